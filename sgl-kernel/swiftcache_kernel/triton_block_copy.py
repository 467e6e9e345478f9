"""Whole blocks from donor memory to donor memory in Triton, by a GPU that reaches both.

Stream rule, alignment and interpreter: as `triton_kernels` says. Arguments are those of
`block_copy.copy_blocks`, already checked there.
"""

# ruff: noqa: N803 - capitals for compile-time arguments are Triton's convention.
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from swiftcache_kernel.launch import Launch, bind
from swiftcache_kernel.layout import MAX_ALIGNMENT_BYTES
from swiftcache_kernel.triton_kernels import PROGRAMS, STAGES, TILE_WORDS, WORDS


@triton.jit(do_not_specialize=["source", "target", "blocks"])
def copy_blocks_kernel(
    source: tl.tensor,
    target: tl.tensor,
    blocks: tl.int32,
    BLOCK_WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes, of every address
    COLUMNS: tl.constexpr,  # words in a tile, all of one block
    STAGES: tl.constexpr,
) -> None:
    tiles_per_block: tl.constexpr = (BLOCK_WORDS + COLUMNS - 1) // COLUMNS
    tiles = blocks.to(tl.int64) * tiles_per_block
    first_tile = tl.program_id(0).to(tl.int64)
    for tile in tl.range(first_tile, tiles, tl.num_programs(0), num_stages=STAGES):
        # As tensors of one address: of such loads Triton reads ahead.
        block = tile // tiles_per_block + tl.arange(0, 1)
        column = tile % tiles_per_block * COLUMNS + tl.arange(0, COLUMNS)
        from_block = tl.load(source + block).to(tl.pointer_type(WORD))
        to_block = tl.load(target + block).to(tl.pointer_type(WORD))
        from_words = tl.multiple_of(from_block, [ALIGNMENT])[:, None] + column[None, :]
        to_words = tl.multiple_of(to_block, [ALIGNMENT])[:, None] + column[None, :]
        mask = (column < BLOCK_WORDS)[None, :]
        tl.store(to_words, tl.load(from_words, mask=mask), mask=mask)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, *, block_bytes: int, programs: int = PROGRAMS
) -> None:
    """Block i of `source` -> block i of `target`, in one launch of at most `programs` programs."""
    launch = bind_block_copy(block_bytes, len(source), programs, source.device)
    launch(source, target, len(source))


def bind_block_copy(block_bytes: int, blocks: int, programs: int, device: torch.device) -> Launch:
    """A launch that takes the addresses of `blocks` blocks, of their targets, and `blocks`.

    Compiles on the first use of a size (a second).
    """
    alignment = math.gcd(MAX_ALIGNMENT_BYTES, block_bytes)
    word_bytes = min(alignment, 8)
    block_words = block_bytes // word_bytes
    columns = min(TILE_WORDS, triton.next_power_of_2(block_words))
    return bind(
        copy_blocks_kernel,
        (torch.int64, torch.int64, 0),
        (block_words, WORDS[word_bytes], alignment, columns, STAGES),
        programs=min(programs, blocks * triton.cdiv(block_words, columns)),
        device=device,
    )
