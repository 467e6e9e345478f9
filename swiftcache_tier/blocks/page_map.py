"""Which pages of an engine's KV pool lie in which extents of its memory, and which are lent away.

Page p is at byte p * page_bytes, extent e at byte e * extent_bytes. Page 0 takes what padded rows
of a batch write, so the extent that holds it is never lent. A page across the edge of two extents
is out of use while either of them is lent.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class PageMap:
    """The books of one pool. Used by one thread; no call depends on layers or lent extents."""

    def __init__(self, page_bytes: int, pages: int, extent_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.pages = pages
        self.extent_bytes = extent_bytes
        self.extents = -(-pages * page_bytes // extent_bytes)
        starts = np.arange(self.extents, dtype=np.int64) * extent_bytes
        self._first = starts // page_bytes
        self._end = np.minimum(-(-(starts + extent_bytes) // page_bytes), pages)
        self._holds = np.zeros(pages, dtype=np.int8)
        """By page: how many lent extents it touches."""

    @property
    def extent_pages(self) -> float:
        """Pages that fit into one extent."""
        return self.extent_bytes / self.page_bytes

    @property
    def held(self) -> np.ndarray:
        """Pages that are out of use, int64, in order."""
        return np.flatnonzero(self._holds)

    @property
    def held_count(self) -> int:
        return int(np.count_nonzero(self._holds))

    def pages_of(self, slot: int) -> np.ndarray:
        """Pages that an extent touches, int64."""
        return np.arange(self._first[slot], self._end[slot], dtype=np.int64)

    def wholly_free(self, free: np.ndarray, lent: Iterable[int]) -> np.ndarray:
        """Extents that can be lent now, int64, high ones first.

        free: bool [pages], whether the engine could hand a page out. Costs in proportion to pages.
        """
        whole = self.count_in_each(free | (self._holds > 0)) == self._end - self._first
        whole[self._first == 0] = False
        whole[list(lent)] = False
        return np.flatnonzero(whole)[::-1]

    def count_in_each(self, some: np.ndarray) -> np.ndarray:
        """How many of some pages, bool [pages], each extent touches: int64 [extents]."""
        before = np.concatenate(([0], np.cumsum(some)))
        counts: np.ndarray = before[self._end] - before[self._first]
        return counts

    def hold(self, slots: Iterable[int]) -> np.ndarray:
        """These extents are lent. Returns the pages that go out of use by that, int64."""
        return self._count(slots, 1, 1)

    def release(self, slots: Iterable[int]) -> np.ndarray:
        """These extents are back. Returns the pages that come into use by that, int64."""
        return self._count(slots, -1, 0)

    def _count(self, slots: Iterable[int], step: int, now: int) -> np.ndarray:
        changed = []
        for slot in slots:
            pages = slice(self._first[slot], self._end[slot])
            self._holds[pages] += step
            changed.append(self._first[slot] + np.flatnonzero(self._holds[pages] == now))
        return np.unique(np.concatenate(changed)) if changed else np.empty(0, dtype=np.int64)
