"""Checksums in plain NumPy: what a CPU build runs, and what the Triton kernels must equal.

A word is the widest integer, of at most 8 bytes, that divides every run of the layout, so no word
lies across two runs and a block has no bytes left over. The sum does not depend on the order in
which words are added.

Arguments are those of `checksum`, already checked there. Runs on the calling thread and has
finished on return. Unmapped holes between blocks are not touched.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from swiftcache_kernel.arguments import check_pages
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.pool_buffers import PoolBuffers

# SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014): the
# increment, which spreads the places, and the finalizer, which maps words one to one.
PLACE_FACTOR = 0x9E3779B97F4A7C15
SHIFTS = (30, 27, 31)
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def word_bytes(layout: BlockLayout) -> int:
    return min(layout.alignment_bytes, 8)


def block_checksums(table: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """See `checksum.block_checksums`."""
    keys = _keys(layout)
    # Blocks are hundreds of KiB and more: one pass for each is no cost, and needs no second copy
    # of them all.
    sums = [
        _mix(_words(address, layout.block_bytes, layout), keys).sum(dtype=np.uint64)
        for address in table.tolist()
    ]
    return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


def page_checksums(pages: torch.Tensor, pool: PoolBuffers) -> torch.Tensor:
    """See `checksum.page_checksums`; ValueError if a page is outside."""
    check_pages(pages, pool.pages)
    layout = pool.layout
    keys = _keys(layout)
    numbers = pages.numpy()
    sums = np.zeros(len(pages), dtype=np.uint64)
    for layer in range(layout.layers):
        for address, offset, run_bytes in (
            (pool.k_addresses[layer], layout.k_offset(layer), layout.k_bytes),
            (pool.v_addresses[layer], layout.v_offset(layer), layout.v_bytes),
        ):
            runs = _words(address, pool.pages * run_bytes, layout).reshape(pool.pages, -1)
            first = offset // word_bytes(layout)
            mixed = _mix(runs[numbers], keys[first : first + runs.shape[1]])
            sums += mixed.sum(axis=1, dtype=np.uint64)
    return torch.from_numpy(sums.view(np.int64))


def _keys(layout: BlockLayout) -> NDArray[np.uint64]:
    """What each word of a block is combined with, by its place: uint64 [words]."""
    words = layout.block_bytes // word_bytes(layout)
    return np.arange(1, words + 1, dtype=np.uint64) * np.uint64(PLACE_FACTOR)


def _words(address: int, size_bytes: int, layout: BlockLayout) -> NDArray[np.unsignedinteger]:
    memory = (ctypes.c_char * size_bytes).from_address(address)
    return np.frombuffer(memoryview(memory), dtype=f"u{word_bytes(layout)}")


def _mix(words: NDArray[np.unsignedinteger], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A value for each word, which is another for every other word in its place."""
    mixed: NDArray[np.uint64] = words ^ keys
    mixed ^= mixed >> np.uint64(SHIFTS[0])
    mixed *= np.uint64(FACTORS[0])
    mixed ^= mixed >> np.uint64(SHIFTS[1])
    mixed *= np.uint64(FACTORS[1])
    mixed ^= mixed >> np.uint64(SHIFTS[2])
    return mixed
