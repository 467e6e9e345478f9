"""Where blocks lie in a donor's extents, and donors in a receiver's address range.

The extents ("slots") of a donor lie back to back; blocks are counted through the whole address
range, so block b is at byte b * block_bytes of it, and may straddle the edge of two slots.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.ma  # np.unique imports it at its first call, for which the first lend would wait

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size


@dataclass(frozen=True)
class DonorGeometry:
    """The blocks of one donor's sub-range. Local block i is block `first_block + i`."""

    block_bytes: int
    extent_bytes: int
    extents: int
    offset_bytes: int
    """Of slot 0 in the address range; a multiple of `block_bytes`."""

    def __post_init__(self) -> None:
        if self.block_bytes <= 0 or self.extent_bytes <= 0 or self.extents <= 0:
            raise ValueError(f"{self}: sizes and counts must be positive")
        if self.offset_bytes < 0 or self.offset_bytes % self.block_bytes:
            raise ValueError(f"{self}: the offset must be a multiple of the block size")

    @property
    def first_block(self) -> int:
        return self.offset_bytes // self.block_bytes

    @property
    def blocks(self) -> int:
        """Whole blocks in the sub-range; a remainder at its end is not used."""
        return self.extents * self.extent_bytes // self.block_bytes

    def slots_per_block(self) -> np.ndarray:
        """How many slots each local block touches, int32, shape (blocks,)."""
        starts = np.arange(self.blocks, dtype=np.int64) * self.block_bytes
        last = (starts + self.block_bytes - 1) // self.extent_bytes
        return (last - starts // self.extent_bytes + 1).astype(np.int32)

    def slot_array(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """`slots` as int64. Raises ValueError for one that is not there or is given twice."""
        chosen = np.asarray(slots, dtype=np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.extents):
            raise ValueError(f"slots {chosen.tolist()}: the donor has {self.extents}")
        if np.unique(chosen).size != chosen.size:
            raise ValueError(f"slots {chosen.tolist()}: one is given twice")
        return chosen

    def blocks_touching(self, slots: Sequence[int] | np.ndarray) -> np.ndarray:
        """Local blocks that touch `slots`, int64; a block is repeated for each of them it touches.

        Costs in proportion to the result. Raises ValueError as `slot_array` does.
        """
        starts = self.slot_array(slots) * self.extent_bytes
        first = starts // self.block_bytes
        end = np.minimum(-(-(starts + self.extent_bytes) // self.block_bytes), self.blocks)
        counts = np.maximum(end - first, 0)
        before = np.cumsum(counts) - counts
        return np.repeat(first - before, counts) + np.arange(counts.sum(), dtype=np.int64)


class SubRanges:
    """Places donors in a window of the receiver's address range: first fit, room is used again."""

    def __init__(self, size_bytes: int, start_bytes: int = 0) -> None:
        """The window is `size_bytes` from `start_bytes` of the range, in which offsets count."""
        self._start_bytes = start_bytes
        self._end_bytes = start_bytes + size_bytes
        self._taken: list[tuple[int, int]] = []  # (offset, end), in order

    def take(self, size_bytes: int, block_bytes: int, granularity_bytes: int) -> int:
        """Offset of a free run of `size_bytes` where both a block and an extent may start.

        Raises SwiftCacheError when no run is long enough.
        """
        alignment = math.lcm(block_bytes, granularity_bytes)
        offset = -(-self._start_bytes // alignment) * alignment
        for taken_offset, taken_end in self._taken:
            if offset + size_bytes <= taken_offset:
                break
            offset = max(offset, -(-taken_end // alignment) * alignment)
        if offset + size_bytes > self._end_bytes:
            raise SwiftCacheError(
                f"no room for a donor of {format_size(size_bytes)} in an address range of "
                f"{format_size(self._end_bytes - self._start_bytes)}, "
                f"{format_size(self.taken_bytes)} of which are taken: reserve a larger range or "
                f"use fewer donors"
            )
        insort(self._taken, (offset, offset + size_bytes))
        return offset

    def give_back(self, offset: int) -> None:
        """Free what `take` returned. Raises ValueError for an offset that is not taken."""
        kept = [piece for piece in self._taken if piece[0] != offset]
        if len(kept) == len(self._taken):
            raise ValueError(f"no sub-range is taken at offset {offset}")
        self._taken = kept

    @property
    def taken_bytes(self) -> int:
        return sum(end - offset for offset, end in self._taken)
