"""The two public calls: check the arguments, then copy on the device that holds the pool.

Both calls share one contract.

table:   int64 [n], the address of the first byte of each block, in any order. n may be 0.
pages:   int64 [n], the pool page of each block, in [0, slots // page_tokens).
k, v:    one layer's pool buffers, contiguous [slots, heads, dim], any dtype; dims may differ.
layout:  the bytes of a block; its widths must be those of `k` and `v`.
layer:   which layer of the blocks to move, in [0, layout.layers).

All four tensors are on one device. Only the named layer of the named blocks and the named pages
are read or written. Bits are moved, never converted, so NaN payloads survive.

On "cpu" the copy has finished on return, addresses may have any alignment, and pages outside the
pool raise ValueError. On "cuda" the copy is queued on the caller's current stream of that device
(see `triton_kernels`); table and pages are not read back, so addresses must be mapped there and be
multiples of `layout.alignment_bytes`, and pages must lie inside the pool: nothing checks it.

ValueError, one line, for arguments that break the contract. Safe to call from any thread as long
as no two calls write the same bytes.
"""

from __future__ import annotations

from types import ModuleType

import torch

from swiftcache_kernel import reference
from swiftcache_kernel.layout import BlockLayout


def gather_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
) -> None:
    """Copy one layer of each block into the pool: donor memory -> `k`, `v`.

    `pages` must be distinct (two blocks into one page race); `table` may repeat a block. Shapes,
    devices, streams and errors: see this module's docstring.
    """
    _check(table, pages, k, v, layout, layer)
    if table.numel():
        backend = _backend(k.device.type)
        backend.gather_layer(table, pages, k, v, layout=layout, layer=layer)


def scatter_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
) -> None:
    """Copy pages of the pool into one layer of each block: `k`, `v` -> donor memory.

    `table` must be distinct (two pages into one block race); `pages` may repeat a page. Shapes,
    devices, streams and errors: see this module's docstring.
    """
    _check(table, pages, k, v, layout, layer)
    if table.numel():
        backend = _backend(k.device.type)
        backend.scatter_layer(table, pages, k, v, layout=layout, layer=layer)


def _backend(device_type: str) -> ModuleType:
    if device_type == "cpu":
        return reference
    if device_type == "cuda":
        # Imported late: a CPU build never needs Triton.
        from swiftcache_kernel import triton_kernels

        return triton_kernels
    raise ValueError(f"k is on device type {device_type!r}; expected 'cpu' or 'cuda'")


def _check(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    layer: int,
) -> None:
    """Check everything that can be seen without reading device memory."""
    if not 0 <= layer < layout.layers:
        raise ValueError(f"layer is {layer}; expected 0 to {layout.layers - 1}")
    for name, numbers in (("table", table), ("pages", pages)):
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or not numbers.is_contiguous():
            raise ValueError(f"{name} is {_describe(numbers)}; expected contiguous int64 [n]")
        if numbers.device != k.device:
            raise ValueError(f"{name} is on {numbers.device}, k on {k.device}; expected one device")
    if len(table) != len(pages):
        raise ValueError(
            f"table has {len(table)} blocks, pages has {len(pages)}; expected one page per block"
        )
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


def _describe(tensor: torch.Tensor) -> str:
    order = "contiguous" if tensor.is_contiguous() else "non-contiguous"
    return f"{order} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
