"""A KV pool whose pages hold all their layers together, as donor blocks do.

A page has the bytes of a block, `[layer][k|v][token][head][dim]`, so a layer of it is one run, and
to move one is to copy bytes from an address to another.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from swiftcache_kernel.arguments import check_device_type, check_pages
from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.block_copy import copy_blocks
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.pool_buffers import PoolBuffers


class PageMajorBuffers(PoolBuffers):
    """The pages of such a pool, kept alive by this object.

    raw: contiguous uint8 [pages, layout.block_bytes] on a "cpu" or "cuda" device. ValueError, one
    line, if it is not.
    """

    def __init__(self, layout: BlockLayout, raw: torch.Tensor) -> None:
        if raw.dtype != torch.uint8 or raw.shape[1:] != (layout.block_bytes,):
            raise ValueError(
                f"pages of {raw.dtype} {tuple(raw.shape[1:])}; expected uint8 bytes, "
                f"{layout.block_bytes} to a page"
            )
        if not raw.is_contiguous():
            raise ValueError("the pages do not lie back to back")
        check_device_type(raw.device)
        self.layout = layout
        self.k, self.v = (raw,), (raw,)
        self.device = raw.device
        self.pages = len(raw)
        self.base = raw.data_ptr()

    def page_addresses(self, pages: torch.Tensor) -> torch.Tensor:
        """Where pages begin: int64, in the shape and on the device of `pages`."""
        return self.base + pages * self.layout.block_bytes


class PageMajorTransfer(LayerTransfer):
    """`LayerTransfer` between donor blocks and such pages, by `copy_blocks`."""

    pool: PageMajorBuffers

    def __init__(self, table: torch.Tensor, pages: torch.Tensor, pool: PageMajorBuffers) -> None:
        super().__init__(table, pages, pool)
        if pool.device.type == "cpu":
            check_pages(pages, pool.pages)
        self._addresses = pool.page_addresses(pages)

    def _move(self, layer: int, *, gather: bool) -> None:
        self._move_layers(layer, 1, gather=gather)

    def _move_layers(self, first: int, layers: int, *, gather: bool) -> None:
        layout = self.pool.layout
        offset = layout.k_offset(first)
        block, page = self.table + offset, self._addresses + offset
        source, target = (block, page) if gather else (page, block)
        copy_blocks(source, target, block_bytes=layers * layout.layer_bytes)


def compile_copies(pool: PageMajorBuffers, layers: Iterable[int]) -> None:
    """Compile what transfers launch on a GPU that move so many layers at once, each number once."""
    from swiftcache_kernel.triton_block_copy import bind_block_copy

    for count in set(layers):
        bind_block_copy(count * pool.layout.layer_bytes, 1, 1, pool.device)
