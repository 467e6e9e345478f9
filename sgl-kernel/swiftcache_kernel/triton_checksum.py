"""Checksums of blocks in Triton, by a GPU that reaches the donor memory.

Stream rule, alignment and interpreter: as `triton_kernels` says. The result is allocated on the
current stream and is complete once that stream has passed the call. Arguments are those of
`checksum`, already checked there.
"""

# ruff: noqa: N803 - capitals for compile-time arguments are Triton's convention.
from __future__ import annotations

import torch
import triton
import triton.language as tl

from swiftcache_kernel.checksum_reference import FACTORS, PLACE_FACTOR, SHIFTS, word_bytes
from swiftcache_kernel.launch import Launch, bind
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.triton_kernels import PROGRAMS, STAGES, TILE_WORDS

# Unsigned, so that narrow words are widened with zeros.
WORDS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}

_PLACE_FACTOR = tl.constexpr(PLACE_FACTOR)
_SHIFT_0, _SHIFT_1, _SHIFT_2 = (tl.constexpr(shift) for shift in SHIFTS)
_FACTOR_0, _FACTOR_1 = (tl.constexpr(factor) for factor in FACTORS)


@triton.jit
def _add_tile(
    sums: tl.tensor,
    row: tl.tensor,  # [1], the block or page that the tile is of
    address: tl.tensor,  # int64 [1], where the tile's run begins
    column: tl.tensor,  # [COLUMNS], words of the run
    words_in_run: tl.tensor,
    first_place: tl.tensor,  # place in the block of the run's first word
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """Add what the words of a tile give to the checksum of its row."""
    run = tl.multiple_of(address.to(tl.pointer_type(WORD)), [ALIGNMENT])
    mask = (column < words_in_run)[None, :]
    words = tl.load(run[:, None] + column[None, :], mask=mask, other=0).to(tl.uint64)
    keys = (first_place + column + 1).to(tl.uint64) * _PLACE_FACTOR
    mixed = words ^ keys[None, :]
    mixed ^= mixed >> _SHIFT_0
    mixed *= _FACTOR_0
    mixed ^= mixed >> _SHIFT_1
    mixed *= _FACTOR_1
    mixed ^= mixed >> _SHIFT_2
    mixed = tl.where(mask, mixed.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(sums + row, tl.sum(mixed, axis=1), sem="relaxed")


@triton.jit(do_not_specialize=["table", "sums", "blocks"])
def block_checksums_kernel(
    table: tl.tensor,
    sums: tl.tensor,
    blocks: tl.int32,
    BLOCK_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every address
    COLUMNS: tl.constexpr,  # words in a tile, all of one block
    STAGES: tl.constexpr,
) -> None:
    """`sums`, int64 [blocks], holds zeros before."""
    tiles_per_block: tl.constexpr = (BLOCK_WORDS + COLUMNS - 1) // COLUMNS
    tiles = blocks.to(tl.int64) * tiles_per_block
    first_tile = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        # As tensors of one address: of such loads Triton reads ahead.
        row = tile // tiles_per_block + tl.arange(0, 1)
        column = tile % tiles_per_block * COLUMNS + tl.arange(0, COLUMNS)
        _add_tile(sums, row, tl.load(table + row), column, BLOCK_WORDS, 0, WORD, ALIGNMENT)


@triton.jit(do_not_specialize=["pages", "sums", "blocks", "pool_addresses", "layers"])
def page_checksums_kernel(
    pages: tl.tensor,
    sums: tl.tensor,
    blocks: tl.int32,
    pool_addresses: tl.tensor,
    layers: tl.int32,
    K_BYTES: tl.constexpr,
    V_BYTES: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every address and run
    COLUMNS: tl.constexpr,  # words in a tile, all of either K or V of one layer of a page
    STAGES: tl.constexpr,
) -> None:
    """`pool_addresses` is int64 [layers, 2], K's and V's; `sums` holds zeros before."""
    k_words: tl.constexpr = K_BYTES // WORD_BYTES
    v_words: tl.constexpr = V_BYTES // WORD_BYTES
    k_tiles: tl.constexpr = (k_words + COLUMNS - 1) // COLUMNS
    tiles_per_layer: tl.constexpr = k_tiles + (v_words + COLUMNS - 1) // COLUMNS
    tiles_per_page = layers.to(tl.int64) * tiles_per_layer
    tiles = blocks * tiles_per_page
    first_tile = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile // tiles_per_page + tl.arange(0, 1)
        layer = tile % tiles_per_page // tiles_per_layer
        part = tile % tiles_per_layer
        is_v = part >= k_tiles
        column = tl.where(is_v, part - k_tiles, part) * COLUMNS + tl.arange(0, COLUMNS)
        buffer = tl.load(pool_addresses + 2 * layer + tl.where(is_v, 1, 0))
        address = buffer + tl.load(pages + row) * tl.where(is_v, V_BYTES, K_BYTES)
        words_in_run = tl.where(is_v, v_words, k_words)
        first_place = layer * (k_words + v_words) + tl.where(is_v, k_words, 0)
        _add_tile(sums, row, address, column, words_in_run, first_place, WORD, ALIGNMENT)


def block_checksums(
    table: torch.Tensor, layout: BlockLayout, *, programs: int = PROGRAMS
) -> torch.Tensor:
    """See `checksum.block_checksums`; one launch of at most `programs` programs."""
    sums = torch.zeros_like(table)
    if len(table):
        launch = bind_blocks(layout, len(table), programs, table.device)
        launch(table, sums, len(table))
    return sums


def page_checksums(
    pages: torch.Tensor, pool: PoolBuffers, *, programs: int = PROGRAMS
) -> torch.Tensor:
    """See `checksum.page_checksums`; one launch of at most `programs` programs."""
    sums = torch.zeros_like(pages)
    if len(pages):
        launch = bind_pages(pool, len(pages), programs)
        launch(pages, sums, len(pages), pool.addresses, pool.layout.layers)
    return sums


def compile_checksums(pool: PoolBuffers) -> None:
    """Compile both kernels for this pool, so that no store or load waits for it.

    Some seconds the first time on a machine, then the time to read Triton's cache.
    """
    bind_blocks(pool.layout, 1, 1, pool.device)
    bind_pages(pool, 1, 1)


def bind_blocks(layout: BlockLayout, blocks: int, programs: int, device: torch.device) -> Launch:
    """A launch that takes table, sums and the number of blocks."""
    words = layout.block_bytes // word_bytes(layout)
    columns = _columns(words)
    constants = words, WORDS[word_bytes(layout)], layout.alignment_bytes, columns, STAGES
    return bind(
        block_checksums_kernel,
        (torch.int64, torch.int64, 0),
        constants,
        programs=min(programs, blocks * triton.cdiv(words, columns)),
        device=device,
    )


def bind_pages(pool: PoolBuffers, blocks: int, programs: int) -> Launch:
    """A launch that takes pages, sums, their number, `pool.addresses` and the number of layers.

    ValueError if a buffer of the pool is aligned to less than a word.
    """
    layout = pool.layout
    width = word_bytes(layout)
    if pool.alignment_bytes < width:  # a smaller word would give another checksum
        raise ValueError(
            f"a buffer of the pool is aligned to {pool.alignment_bytes} bytes; expected {width}"
        )
    words = [run // width for run in (layout.k_bytes, layout.v_bytes)]
    columns = _columns(max(words))
    tiles = blocks * layout.layers * sum(triton.cdiv(run, columns) for run in words)
    sizes = layout.k_bytes, layout.v_bytes, WORDS[width], width
    return bind(
        page_checksums_kernel,
        (torch.int64, torch.int64, 0, torch.int64, 0),
        (*sizes, pool.alignment_bytes, columns, STAGES),
        programs=min(programs, tiles),
        device=pool.device,
    )


def _columns(words: int) -> int:
    return min(TILE_WORDS, triton.next_power_of_2(words))
