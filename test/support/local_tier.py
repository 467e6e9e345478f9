"""A tier without processes: real extents and the real block pool, donors joined by hand.

It has the part of ``DonorTier`` that the radix tree uses. Memory that was given back is unmapped,
so a read of it is a segmentation fault, not a wrong byte that a test might miss.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftcache_tier.blocks.geometry import SubRanges
from swiftcache_tier.blocks.placement import DonorRank, Link
from swiftcache_tier.blocks.pool import BlockPool
from swiftcache_tier.extents.address_range import HostAddressRange
from swiftcache_tier.extents.host import HostArena

RANGE_BYTES = 1 << 30


class LocalTier:
    """One receiver's tier; ``extent_bytes`` is deliberately no multiple of a block."""

    def __init__(self, block_bytes: int, extent_bytes: int = 8192) -> None:
        self.block_bytes = block_bytes
        self.extent_bytes = extent_bytes
        self.pool = BlockPool(block_bytes)
        self._range = HostAddressRange(RANGE_BYTES)
        self._places = SubRanges(RANGE_BYTES)
        self._arena = HostArena()
        self._offsets: dict[int, int] = {}
        self._late: dict[int, bool] = {}
        self._asked_back: list[tuple[int, list[int]]] = []

    # -- what a donor does --------------------------------------------------------------------

    def join(self, key: int, extents: int) -> None:
        """A donor comes with ``extents`` extents and lends them all."""
        offset = self._places.take(
            extents * self.extent_bytes, self.block_bytes, math.lcm(4096, self.extent_bytes)
        )
        self._offsets[key] = offset
        self.pool.add_donor(key, offset, self.extent_bytes, extents, DonorRank(Link.HOST, 20.0))
        self.lend(key, range(extents))

    def lend(self, key: int, slots: Sequence[int]) -> None:
        for slot in slots:
            descriptor = self._arena.create(self.extent_bytes).share()
            at = self._offsets[key] + slot * self.extent_bytes
            self._range.map(at, descriptor, self.extent_bytes)
            os.close(descriptor)
        self.pool.map_slots(key, list(slots))

    def ask_back(self, key: int, slots: Sequence[int]) -> None:
        self.pool.retire_slots(key, list(slots))
        self._asked_back.append((key, list(slots)))

    def lose(self, key: int, slots: Sequence[int]) -> None:
        """A donor ends without a word; ``slots`` are all that it lent."""
        self._late[key] = False
        self.ask_back(key, slots)

    def pass_deadline(self, key: int) -> None:
        """So long ago that what is still there is not to be moved any more."""
        self._late[key] = True

    @property
    def waiting(self) -> list[tuple[int, list[int]]]:
        """Extents asked back that still hold blocks in use."""
        return self._asked_back

    # -- what the tree uses -------------------------------------------------------------------

    def start(self) -> None:
        pass

    def poll(self) -> None:
        waiting = []
        for key, slots in self._asked_back:
            if self.pool.vacated(key, slots):
                self.pool.unmap_slots(key, slots)
                for slot in slots:
                    at = self._offsets[key] + slot * self.extent_bytes
                    self._range.unmap(at, self.extent_bytes)
            else:
                waiting.append((key, slots))
        self._asked_back = waiting

    def alloc(self, n: int) -> np.ndarray | None:
        return self.pool.alloc(n)

    def alloc_apart(self, placed: np.ndarray) -> np.ndarray:
        return self.pool.alloc_apart(placed)

    def has_room(self, blocks: int, copies: int) -> bool:
        return self.pool.has_room(blocks, copies)

    def free(self, ids: np.ndarray) -> None:
        self.pool.free(ids)

    def free_all(self) -> None:
        self.pool.free(self.pool.in_use())

    def in_gpu_memory(self, ids: np.ndarray) -> bool:
        return False

    def must_vacate(self) -> np.ndarray:
        return self.pool.retiring_in_use()

    def extents_to_return(self) -> int:
        return sum(len(slots) for _, slots in self._asked_back)

    def addresses(self, ids: np.ndarray) -> np.ndarray:
        return self._range.base + ids * self.block_bytes

    def donor_of(self, ids: np.ndarray) -> np.ndarray:
        return self.pool.donor_of(ids)

    def donor_names(self) -> dict[int, str]:
        return {key: f"donor-{key}" for key in self._offsets}

    def link_kinds(self) -> dict[int, str]:
        return dict.fromkeys(self._offsets, "host")

    def lost_donors(self) -> set[int]:
        return set(self._late)

    def past_deadline(self, ids: np.ndarray) -> np.ndarray:
        return np.isin(self.donor_of(ids), [key for key, late in self._late.items() if late])

    @property
    def free_blocks(self) -> int:
        return self.pool.counts().free

    @property
    def used_blocks(self) -> int:
        counts = self.pool.counts()
        return counts.used + counts.retiring

    @property
    def total_blocks(self) -> int:
        return self.pool.counts().total

    def status(self) -> dict[str, Any]:
        return {
            "donors": [],
            "blocks": self.pool.counts()._asdict(),
            "orphaned_extents": 0,
            "reclaims": {},
        }

    def check(self) -> None:
        self.pool.check()

    def close(self) -> None:
        self._range.close()
