"""Layer gather and scatter in Triton, for donor memory mapped on the pool's GPU.

The table may name memory of this GPU, of a peer over NVLink, and pinned host memory at once.

Stream rule: the copy is queued on the caller's current stream of the device of `k` and this
module never waits. Until the stream has passed it, the caller keeps all four tensors and the
donor mapping alive (`Tensor.record_stream`, or an event) and orders other work on the same bytes.
CUDA graphs may capture it; `n`, `layer` and the buffers are then fixed, the contents of `table`
and `pages` are read at replay.

Arguments are those of `dispatch`, already checked there, with n > 0. Addresses must be multiples
of `layout.alignment_bytes`: wide loads depend on it and nothing checks it. The kernels also run
under Triton's interpreter on CPU tensors, with addresses of this process.
"""

# ruff: noqa: N803 - capitals for compile-time arguments are Triton's convention.
from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from swiftcache_kernel.layout import BlockLayout

# Programs in the grid; each strides over tiles. Between two H200s, for 4096 blocks of 64 KiB, 16,
# 32 and 132 programs read 290, 357 and 360 GB/s from the peer and write 321, 344 and 358 (copy
# engine: 384). 32 leave 100 SMs to the matrix products beside the transfer.
PROGRAMS = 32
NUM_WARPS = 8
# Words of a tile: four 16-byte accesses in each of 256 threads.
TILE_WORDS = 2048
# Tiles under way in a program: while one is stored, the next two are read.
STAGES = 3

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["blocks", "k_address", "v_address", "layer_offset"])
def move_layer_kernel(
    table: tl.tensor,
    pages: tl.tensor,
    blocks: tl.tensor,
    k_address: tl.tensor,
    v_address: tl.tensor,
    layer_offset: tl.tensor,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every address and run
    ROWS: tl.constexpr,  # blocks in a tile
    COLUMNS: tl.constexpr,  # words of each block in a tile
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Each tile is ROWS blocks by COLUMNS words of either their K or their V run."""
    k_words: tl.constexpr = K_BYTES // WORD_BYTES
    v_words: tl.constexpr = V_BYTES // WORD_BYTES
    k_tiles: tl.constexpr = (k_words + COLUMNS - 1) // COLUMNS
    v_tiles: tl.constexpr = (v_words + COLUMNS - 1) // COLUMNS
    tiles_per_row: tl.constexpr = k_tiles + v_tiles
    tiles = ((blocks + ROWS - 1) // ROWS).to(tl.int64) * tiles_per_row
    first_tile = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile // tiles_per_row * ROWS + tl.arange(0, ROWS)
        part = tile % tiles_per_row
        is_v = part >= k_tiles
        first = tl.where(is_v, part - k_tiles, part) * COLUMNS
        column = first + tl.arange(0, COLUMNS)
        listed = row < blocks
        block = tl.load(table + row, mask=listed, other=0)
        page = tl.load(pages + row, mask=listed, other=0)
        donor_run = block + layer_offset + tl.where(is_v, K_BYTES, 0)
        pool_run = tl.where(is_v, v_address + page * V_BYTES, k_address + page * K_BYTES)
        # The hint goes on pointers, before the column offset: from it follow 16-byte accesses.
        donor = tl.multiple_of(donor_run.to(tl.pointer_type(WORD)), [ALIGNMENT])
        pool = tl.multiple_of(pool_run.to(tl.pointer_type(WORD)), [ALIGNMENT])
        mask = listed[:, None] & (column < tl.where(is_v, v_words, k_words))[None, :]
        donor_words = donor[:, None] + column[None, :]
        pool_words = pool[:, None] + column[None, :]
        if GATHER:
            tl.store(pool_words, tl.load(donor_words, mask=mask), mask=mask)
        else:
            tl.store(donor_words, tl.load(pool_words, mask=mask), mask=mask)


def gather_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
    programs: int = PROGRAMS,
    num_warps: int = NUM_WARPS,
) -> None:
    """Donor memory -> `k`, `v` in one launch of at most `programs` programs.

    See `dispatch.gather_layer` for shapes and this module for streams and alignment.
    """
    _launch(table, pages, k, v, layout, layer, programs, num_warps, gather=True)


def scatter_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
    programs: int = PROGRAMS,
    num_warps: int = NUM_WARPS,
) -> None:
    """`k`, `v` -> donor memory in one launch of at most `programs` programs.

    See `dispatch.scatter_layer` for shapes and this module for streams and alignment.
    """
    _launch(table, pages, k, v, layout, layer, programs, num_warps, gather=False)


class _Tiling(NamedTuple):
    """How one layer of a table is cut into tiles of `rows` blocks by `columns` words."""

    word_bytes: int
    rows: int
    columns: int
    tiles_per_row: int  # K's and V's together


@lru_cache
def _tiling(layout: BlockLayout, alignment: int) -> _Tiling:
    word_bytes = min(alignment, 8)
    k_words, v_words = layout.k_bytes // word_bytes, layout.v_bytes // word_bytes
    columns = min(TILE_WORDS, triton.next_power_of_2(max(k_words, v_words)))
    tiles_per_row = triton.cdiv(k_words, columns) + triton.cdiv(v_words, columns)
    return _Tiling(word_bytes, TILE_WORDS // columns, columns, tiles_per_row)


def _launch(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    layer: int,
    programs: int,
    num_warps: int,
    *,
    gather: bool,
) -> None:
    alignment = math.gcd(layout.alignment_bytes, k.data_ptr(), v.data_ptr())
    tiling = _tiling(layout, alignment)
    tiles = -(-len(table) // tiling.rows) * tiling.tiles_per_row
    with torch.cuda.device_of(k):
        move_layer_kernel[(min(programs, tiles),)](
            table,
            pages,
            len(table),
            k.data_ptr(),
            v.data_ptr(),
            layout.k_offset(layer),
            K_BYTES=layout.k_bytes,
            V_BYTES=layout.v_bytes,
            WORD=_WORDS[tiling.word_bytes],
            WORD_BYTES=tiling.word_bytes,
            ALIGNMENT=alignment,
            ROWS=tiling.rows,
            COLUMNS=tiling.columns,
            STAGES=STAGES,
            GATHER=gather,
            num_warps=num_warps,
        )
