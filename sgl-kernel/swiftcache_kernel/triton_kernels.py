"""Layer gather and scatter in Triton, for donor memory mapped on the pool's GPU.

The table may name memory of this GPU, of a peer over NVLink, and pinned host memory at once.

Stream rule: a copy is queued on the caller's current stream of the pool's device and this module
never waits. Until the stream has passed it, the caller keeps all tensors and the donor mapping
alive (`Tensor.record_stream`, or an event) and orders other work on the same bytes. CUDA graphs
may capture it; the number of blocks, the layer and the buffers are then fixed, the contents of
`table` and `pages` are read at replay.

Arguments are those of `dispatch`, already checked there. Addresses must be multiples of
`layout.alignment_bytes`: wide loads depend on it and nothing checks it. The kernels also run
under Triton's interpreter on CPU tensors, with addresses of this process.
"""

# ruff: noqa: N803 - capitals for compile-time arguments are Triton's convention.
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from swiftcache_kernel.launch import NUM_WARPS, Launch, bind
from swiftcache_kernel.layout import BlockLayout

# Programs in the grid; each strides over tiles. Between two H200s, for 4096 blocks of 64 KiB, 16,
# 32 and 64 programs read 288, 355 and 358 GB/s from the peer (copy engine: 385). 32 leave 100 SMs
# to the matrix products beside the transfer.
PROGRAMS = 32
# Words of a tile: four 16-byte accesses in each of 256 threads.
TILE_WORDS = 2048
# Tiles under way in a program: while one is stored, the next two are read.
STAGES = 3
# Up to so many programs, each keeps three times the bytes under way: the rate over a link is the
# bytes under way by the time that a read takes. It costs 96 KiB of an SM's shared memory.
FEW_PROGRAMS = 16
FEW_PROGRAMS_TILE_WORDS = 4096
FEW_PROGRAMS_STAGES = 4


class Grid(NamedTuple):
    """How launches share out the tiles of a layer."""

    programs: int
    """In one launch, at most: no more than there are tiles."""
    tile_words: int = TILE_WORDS
    stages: int = STAGES
    """1: a tile goes through registers alone, and takes no shared memory."""
    warps: int = NUM_WARPS
    launches: int = 1
    """So many in a row share the tiles. Each finds SMs anew, and frees them when it ends."""


# Beside attention that leaves a few SMs free, programs end up six to an SM, of which each reads 34
# GB/s at most: twice as many find SMs enough. Steps of a Qwen3-8B that read 12.6 GB from a peer
# took 39.9 ms with 32 and 37.5 with 64, those that read 0.9 GB 6.5 and 6.2.
COUNTED_GRID = Grid(2 * PROGRAMS)

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _move_tile(
    tile: tl.tensor,
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
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_TILES: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """A tile is ROWS blocks by COLUMNS words of either their K or their V run."""
    row = tile // TILES_PER_ROW * ROWS + tl.arange(0, ROWS)
    part = tile % TILES_PER_ROW
    is_v = part >= K_TILES
    first = tl.where(is_v, part - K_TILES, part) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    listed = row < blocks
    block = tl.load(table + row, mask=listed, other=0)
    page = tl.load(pages + row, mask=listed, other=0)
    donor_run = block + layer_offset + tl.where(is_v, K_BYTES, 0)
    pool_run = tl.where(is_v, v_address + page * V_BYTES, k_address + page * K_BYTES)
    # The hint goes on pointers, before the column offset: from it follow 16-byte accesses.
    donor = tl.multiple_of(donor_run.to(tl.pointer_type(WORD)), [ALIGNMENT])
    pool = tl.multiple_of(pool_run.to(tl.pointer_type(WORD)), [ALIGNMENT])
    words = tl.where(is_v, V_BYTES // WORD_BYTES, K_BYTES // WORD_BYTES)
    mask = listed[:, None] & (column < words)[None, :]
    donor_words = donor[:, None] + column[None, :]
    pool_words = pool[:, None] + column[None, :]
    if GATHER:
        tl.store(pool_words, tl.load(donor_words, mask=mask), mask=mask)
    else:
        tl.store(donor_words, tl.load(pool_words, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["table", "pages", "blocks", "k_address", "v_address", "layer"])
def move_layer_kernel(
    table: tl.tensor,
    pages: tl.tensor,
    blocks: tl.int32,
    k_address: tl.int64,
    v_address: tl.int64,
    layer: tl.int32,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every address and run
    ROWS: tl.constexpr,  # blocks in a tile
    COLUMNS: tl.constexpr,  # words of each block in a tile
    K_TILES: tl.constexpr,  # of each row of tiles, those that hold K; they come first
    TILES_PER_ROW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Move one layer. Its pool buffers are given by their addresses."""
    tiles = ((blocks + ROWS - 1) // ROWS).to(tl.int64) * TILES_PER_ROW
    first_tile = tl.program_id(0).to(tl.int64)
    layer_offset = layer.to(tl.int64) * (K_BYTES + V_BYTES)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        _move_tile(
            tile,
            table,
            pages,
            blocks,
            k_address,
            v_address,
            layer_offset,
            K_BYTES,
            V_BYTES,
            WORD,
            WORD_BYTES,
            ALIGNMENT,
            ROWS,
            COLUMNS,
            K_TILES,
            TILES_PER_ROW,
            GATHER,
        )


@triton.jit(
    do_not_specialize=["table", "pages", "count", "k_address", "v_address", "layer", "launch"]
)
def move_counted_layer_kernel(
    table: tl.tensor,
    pages: tl.tensor,
    count: tl.tensor,
    k_address: tl.int64,
    v_address: tl.int64,
    layer: tl.int32,
    launch: tl.int32,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_TILES: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
    LAUNCHES: tl.constexpr,
) -> None:
    """Move one layer of as many blocks as `count`, one int64 on the device, says.

    Programs of all LAUNCHES launches share the tiles as if they were of one.
    """
    blocks = tl.load(count)
    tiles = (blocks + ROWS - 1) // ROWS * TILES_PER_ROW
    programs = tl.num_programs(0)
    first_tile = launch.to(tl.int64) * programs + tl.program_id(0)
    layer_offset = layer.to(tl.int64) * (K_BYTES + V_BYTES)
    for tile in tl.range(first_tile, tiles, programs * LAUNCHES, num_stages=STAGES):
        _move_tile(
            tile,
            table,
            pages,
            blocks,
            k_address,
            v_address,
            layer_offset,
            K_BYTES,
            V_BYTES,
            WORD,
            WORD_BYTES,
            ALIGNMENT,
            ROWS,
            COLUMNS,
            K_TILES,
            TILES_PER_ROW,
            GATHER,
        )


@triton.jit(do_not_specialize=["table", "pages", "blocks", "pool_addresses", "first", "layers"])
def move_layers_kernel(
    table: tl.tensor,
    pages: tl.tensor,
    blocks: tl.int32,
    pool_addresses: tl.tensor,
    first: tl.int32,
    layers: tl.int32,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    K_TILES: tl.constexpr,
    TILES_PER_ROW: tl.constexpr,
    STAGES: tl.constexpr,
    GATHER: tl.constexpr,
) -> None:
    """Move `layers` layers from `first` on, in order. `pool_addresses` is int64 [all layers, 2],
    K's and V's."""
    programs = tl.num_programs(0)
    layer_bytes = tl.full((), K_BYTES + V_BYTES, tl.int64)
    tiles = ((blocks + ROWS - 1) // ROWS).to(tl.int64) * TILES_PER_ROW
    for nth in range(layers):
        layer = first + nth
        k_address = tl.load(pool_addresses + 2 * layer)
        v_address = tl.load(pool_addresses + 2 * layer + 1)
        # Deal on where the last layer's tiles ended, so that all programs get as many.
        first_tile = (tl.program_id(0) + programs - nth * tiles % programs) % programs
        for tile in tl.range(first_tile, tiles, programs, num_stages=STAGES):
            _move_tile(
                tile,
                table,
                pages,
                blocks,
                k_address,
                v_address,
                layer * layer_bytes,
                K_BYTES,
                V_BYTES,
                WORD,
                WORD_BYTES,
                ALIGNMENT,
                ROWS,
                COLUMNS,
                K_TILES,
                TILES_PER_ROW,
                GATHER,
            )


def gather_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
    programs: int = PROGRAMS,
) -> None:
    """Donor memory -> `k`, `v` in one launch of at most `programs` programs.

    See `dispatch.gather_layer` for shapes and this module for streams and alignment.
    """
    launch = bind_layer(
        layout, _alignment(layout, k, v), len(table), programs, k.device, gather=True
    )
    launch(table, pages, len(table), k.data_ptr(), v.data_ptr(), layer)


def scatter_layer(
    table: torch.Tensor,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: BlockLayout,
    layer: int,
    programs: int = PROGRAMS,
) -> None:
    """`k`, `v` -> donor memory in one launch of at most `programs` programs.

    See `dispatch.scatter_layer` for shapes and this module for streams and alignment.
    """
    launch = bind_layer(
        layout, _alignment(layout, k, v), len(table), programs, k.device, gather=False
    )
    launch(table, pages, len(table), k.data_ptr(), v.data_ptr(), layer)


def bind_layer(
    layout: BlockLayout,
    alignment_bytes: int,
    blocks: int,
    programs: int,
    device: torch.device,
    *,
    gather: bool,
) -> Launch:
    """A launch of at most `programs` programs that moves one layer of `blocks` blocks.

    It takes table, pages, blocks, the addresses of K and V, and the layer. `alignment_bytes`, a
    power of two up to 16, must divide these addresses and `layout.alignment_bytes`.
    """
    tiling = _tiling(layout, alignment_bytes, *_tile_of(programs))
    return bind(
        move_layer_kernel,
        (torch.int64, torch.int64, 0, 0, 0, 0),
        (*tiling.constants, gather),
        programs=min(programs, tiling.tiles(blocks)),
        device=device,
    )


def bind_counted_layer(
    layout: BlockLayout,
    alignment_bytes: int,
    capacity: int,
    grid: Grid,
    device: torch.device,
    *,
    gather: bool,
) -> Launch:
    """A launch that moves its part of one layer of as many blocks as the device says.

    It takes table, pages, count (int64 [1], up to `capacity`), the addresses of K and V, the
    layer, and which of `grid.launches` launches it is.
    """
    tiling = _tiling(layout, alignment_bytes, grid.tile_words, grid.stages)
    return bind(
        move_counted_layer_kernel,
        (torch.int64, torch.int64, torch.int64, 0, 0, 0, 0),
        (*tiling.constants, gather, grid.launches),
        programs=min(grid.programs, tiling.tiles(capacity)),
        device=device,
        warps=grid.warps,
    )


def bind_layers(
    layout: BlockLayout,
    alignment_bytes: int,
    blocks: int,
    layers: int,
    programs: int,
    device: torch.device,
    *,
    gather: bool,
) -> Launch:
    """A launch of at most `programs` programs that moves `layers` layers of `blocks` blocks.

    It takes table, pages, blocks, `PoolBuffers.addresses`, the first layer and their number.
    """
    tiling = _tiling(layout, alignment_bytes, *_tile_of(programs))
    return bind(
        move_layers_kernel,
        (torch.int64, torch.int64, 0, torch.int64, 0, 0),
        (*tiling.constants, gather),
        programs=min(programs, tiling.tiles(blocks) * layers),
        device=device,
    )


class _Tiling(NamedTuple):
    """How one layer of a table is cut into tiles."""

    rows: int  # blocks in a tile
    tiles_per_row: int  # K's and V's together
    constants: tuple[Any, ...]  # of the kernels, before GATHER

    def tiles(self, blocks: int) -> int:
        return -(-blocks // self.rows) * self.tiles_per_row


@lru_cache
def _tiling(layout: BlockLayout, alignment_bytes: int, tile_words: int, stages: int) -> _Tiling:
    word_bytes = min(alignment_bytes, 8)
    k_words, v_words = layout.k_bytes // word_bytes, layout.v_bytes // word_bytes
    columns = min(tile_words, triton.next_power_of_2(max(k_words, v_words)))
    rows = tile_words // columns
    k_tiles = triton.cdiv(k_words, columns)
    tiles_per_row = k_tiles + triton.cdiv(v_words, columns)
    bytes_and_words = layout.k_bytes, layout.v_bytes, WORDS[word_bytes], word_bytes
    cut = alignment_bytes, rows, columns, k_tiles, tiles_per_row, stages
    return _Tiling(rows, tiles_per_row, (*bytes_and_words, *cut))


def _tile_of(programs: int) -> tuple[int, int]:
    """Words of a tile, and stages."""
    if programs <= FEW_PROGRAMS:
        return FEW_PROGRAMS_TILE_WORDS, FEW_PROGRAMS_STAGES
    return TILE_WORDS, STAGES


def _alignment(layout: BlockLayout, k: torch.Tensor, v: torch.Tensor) -> int:
    return math.gcd(layout.alignment_bytes, k.data_ptr(), v.data_ptr())
