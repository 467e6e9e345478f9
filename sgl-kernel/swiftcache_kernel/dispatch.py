"""The public calls: check the arguments, then copy on the device that holds the pool.

All of them share one contract.

table:   int64 [n], the address of the first byte of each block, in any order. n may be 0.
pages:   int64 [n], the pool page of each block, in [0, slots // page_tokens).
k, v:    one layer's pool buffers, contiguous [slots, heads, dim], any dtype; dims may differ.
layout:  the bytes of a block; its widths must be those of `k` and `v`.
layer:   which layer of the blocks to move, in [0, layout.layers).

All tensors are on one device. Only the named layer of the named blocks and the named pages are
read or written. Bits are moved, never converted, so NaN payloads survive. A gather needs distinct
pages (two blocks into one page race), and may name a block twice; a scatter needs distinct blocks,
and may name a page twice.

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
from swiftcache_kernel.arguments import (
    check_batch,
    check_buffers,
    check_device_type,
    check_layer,
)
from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.paths import KERNEL, Path
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.runs import Runs


def layer_transfer(
    table: torch.Tensor,
    pages: torch.Tensor,
    pool: PoolBuffers,
    *,
    path: Path = KERNEL,
    runs: Runs | None = None,
) -> LayerTransfer:
    """Blocks and the pages they pair with, to be moved layer by layer.

    path: what moves them on "cuda"; on "cpu" it does not matter.
    runs: the same batch on the host; needed, and read, by the copy engine only.

    Shapes, devices, streams and errors: see this module's docstring and `LayerTransfer`.
    """
    if pool.device.type == "cpu":
        return reference.ReferenceTransfer(table, pages, pool)
    # Imported late, both: a CPU build has neither Triton nor the CUDA runtime.
    if path.name == "kernel":
        from swiftcache_kernel.kernel_transfer import KernelTransfer

        return KernelTransfer(table, pages, pool, path.programs)
    if runs is None:
        raise ValueError(
            "the copy engine needs the batch on the host and runs is None; give runs or take the "
            "kernel path"
        )
    from swiftcache_kernel.copy_engine import CopyEngine, CopyTransfer

    return CopyTransfer(table, pages, pool, runs, CopyEngine(pool.device))


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

    Shapes, devices, streams and errors: see this module's docstring.
    """
    backend = _backend(table, pages, k, v, layout, layer)
    if table.numel():
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

    Shapes, devices, streams and errors: see this module's docstring.
    """
    backend = _backend(table, pages, k, v, layout, layer)
    if table.numel():
        backend.scatter_layer(table, pages, k, v, layout=layout, layer=layer)


def _backend(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    layer: int,
) -> ModuleType:
    """What copies, once the arguments have been looked at."""
    check_layer(layer, layout)
    check_batch(table, pages, k.device)
    check_buffers(k, v, layout)
    check_device_type(k.device)
    if k.device.type == "cpu":
        return reference
    from swiftcache_kernel import triton_kernels

    return triton_kernels
