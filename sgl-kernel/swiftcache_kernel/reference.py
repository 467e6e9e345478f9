"""Layer gather and scatter in plain PyTorch, for donor memory mapped into this process.

This is what a CPU build runs, and what the Triton kernels are tested against. Blocks lie at
`base + id * block_bytes` in one reserved address range, so a whole table is one strided view of
memory, and a layer's K (or V) is one indexed copy. Nothing is allocated in proportion to the
range, and only indexed rows are touched: the range may have unmapped holes.

Arguments are those of `dispatch`, already checked there. Runs on the calling thread (and
PyTorch's own pool) and has finished on return.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from swiftcache_kernel.arguments import check_pages
from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.layout import BlockLayout

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
) -> None:
    """Donor memory -> `k`, `v`. See `dispatch.gather_layer`; ValueError if a page is outside."""
    for run in _runs(table, pages, k, v, layout, layer):
        run.pool.index_copy_(0, run.pages, run.donor.index_select(0, run.rows))


def scatter_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
) -> None:
    """`k`, `v` -> donor memory. See `dispatch.scatter_layer`; ValueError if a page is outside."""
    for run in _runs(table, pages, k, v, layout, layer):
        run.donor.index_copy_(0, run.rows, run.pool.index_select(0, run.pages))


class ReferenceTransfer(LayerTransfer):
    """`LayerTransfer` by this copy. ValueError, when it moves, if a page is outside the pool."""

    def _move(self, layer: int, *, gather: bool) -> None:
        pool = self.pool
        move = gather_layer if gather else scatter_layer
        k, v = pool.k[layer], pool.v[layer]
        move(self.table, self.pages, k, v, layout=pool.layout, layer=layer)


class _Run(NamedTuple):
    """Equally spaced donor runs and the pool pages they pair with, seen as integer words.

    Words are integers because copies of floats may quieten NaNs, and fp8 has no indexing.
    """

    donor: torch.Tensor  # [rows, words], one row per block of the span, strided over the block
    rows: torch.Tensor  # int64 [m]
    pool: torch.Tensor  # [pages, words]
    pages: torch.Tensor  # int64 [m]


class _Span(NamedTuple):
    """Blocks at `address + row * block_bytes`."""

    address: int
    rows: torch.Tensor  # int64 [m]
    pages: torch.Tensor  # int64 [m]


def _runs(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    layer: int,
) -> Iterator[_Run]:
    pool_pages = len(k) // layout.page_tokens
    check_pages(pages, pool_pages)
    for span in _spans(table, pages, layout.block_bytes):
        word_bytes = math.gcd(8, layout.alignment_bytes, span.address, *map(_alignment, (k, v)))
        word = _WORDS[word_bytes]
        span_bytes = (int(span.rows.max()) + 1) * layout.block_bytes
        memory = torch.frombuffer(
            (ctypes.c_char * span_bytes).from_address(span.address), dtype=word
        )
        for buffer, offset, run_bytes in (
            (k, layout.k_offset(layer), layout.k_bytes),
            (v, layout.v_offset(layer), layout.v_bytes),
        ):
            words = run_bytes // word_bytes
            donor = memory.as_strided(
                (span_bytes // layout.block_bytes, words),
                (layout.block_bytes // word_bytes, 1),
                offset // word_bytes,
            )
            whole_pages = buffer[: pool_pages * layout.page_tokens]
            pool = whole_pages.view(-1).view(word).view(pool_pages, words)
            yield _Run(donor, span.rows, pool, span.pages)


def _spans(table: torch.Tensor, pages: torch.Tensor, block_bytes: int) -> Iterator[_Span]:
    """Group blocks whose addresses differ by whole blocks: one group, unless ranges differ."""
    lowest = int(table.min())
    residues = (table - lowest) % block_bytes
    if not residues.any():
        yield _Span(lowest, (table - lowest) // block_bytes, pages)
        return
    order = residues.argsort()
    _, counts = residues[order].unique_consecutive(return_counts=True)
    for members in order.split(counts.tolist()):
        addresses = table[members]
        lowest = int(addresses.min())
        yield _Span(lowest, (addresses - lowest) // block_bytes, pages[members])


def _alignment(buffer: torch.Tensor) -> int:
    """Bytes that divide both the address and the storage offset, as `Tensor.view(dtype)` asks."""
    return math.gcd(buffer.data_ptr(), buffer.storage_offset() * buffer.itemsize)
