"""What a batch of blocks and a pool must look like, as far as it shows without device memory.

Each check raises ValueError, one line that names what was wrong and what was expected.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from swiftcache_kernel.layout import BlockLayout


def check_batch(table: torch.Tensor, pages: torch.Tensor, device: torch.device) -> None:
    """`table` and `pages` must be int64 [n] on the device of the pool."""
    for name, numbers in (("table", table), ("pages", pages)):
        check_numbers(name, numbers)
        if numbers.device != device:
            raise ValueError(f"{name} is on {numbers.device}, k on {device}; expected one device")
    if len(table) != len(pages):
        raise ValueError(
            f"table has {len(table)} blocks, pages has {len(pages)}; expected one page per block"
        )


def check_numbers(name: str, numbers: torch.Tensor) -> None:
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or not numbers.is_contiguous():
        raise ValueError(f"{name} is {_describe(numbers)}; expected contiguous int64 [n]")


def check_pages(pages: torch.Tensor | NDArray[np.int64], pool_pages: int) -> None:
    """`pages`, int64 [n] on the host, must lie in the pool; any will do if n is 0."""
    if not len(pages):
        return
    first, last = int(pages.min()), int(pages.max())
    if first < 0 or last >= pool_pages:
        raise ValueError(f"pages run from {first} to {last}; expected 0 to {pool_pages - 1}")


def check_layer(layer: int, layout: BlockLayout) -> None:
    if not 0 <= layer < layout.layers:
        raise ValueError(f"layer is {layer}; expected 0 to {layout.layers - 1}")


def check_buffers(k: torch.Tensor, v: torch.Tensor, layout: BlockLayout) -> None:
    """`k` and `v` must be [slots, heads, dim] of one layer, as wide as the layout says."""
    if v.device != k.device:
        raise ValueError(f"v is on {v.device}, k on {k.device}; expected one device")
    for name, pool, token_bytes in (
        ("k", k, layout.k_token_bytes),
        ("v", v, layout.v_token_bytes),
    ):
        if pool.dim() != 3 or not pool.is_contiguous():
            raise ValueError(
                f"{name} is {_describe(pool)}; expected contiguous [slots, heads, dim]"
            )
        width = pool.shape[1] * pool.shape[2] * pool.itemsize
        if width != token_bytes:
            raise ValueError(
                f"{name} has {width} bytes per token; the layout expects {token_bytes}"
            )
    if len(k) != len(v):
        raise ValueError(f"k has {len(k)} slots, v has {len(v)}; expected the same number")


def check_device_type(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"k is on device type {device.type!r}; expected 'cpu' or 'cuda'")


def _describe(tensor: torch.Tensor) -> str:
    order = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{order} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
