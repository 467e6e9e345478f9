"""Empty extents of the KV pool, so that they can be lent: evict cold leaves, move pages.

After hours of service hardly an extent is free from end to end, however much of the pool is. A
page of a prefix that no request uses can be moved: its bytes are copied, and its node in the tree
is told. What a request uses, or a transfer, stays where it is.

A step is short, since a request that comes meanwhile waits for it. Whose each page is takes many
steps to learn, so what was learned is worked by for as long as it leads anywhere, and looked at
again in an extent that is about to be emptied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.swiftcache.cold_prefixes import ColdPrefixes, Look
from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from sglang.srt.swiftcache.forward_fence import ForwardFence
from swiftcache_tier.extents.neighbours import side_by_side
from swiftcache_tier.settings import Settings

NOBODY = -1

NEIGHBOUR_WORTH = 0.5
"""To empty an extent beside one that is lent, so much of an extent more is moved."""


@dataclass
class CompactionTotals:
    """What lending has cost the donor's own cache."""

    evicted_tokens: int = 0
    moved_pages: int = 0
    emptied_extents: int = 0
    seconds: float = 0.0
    """Of the scheduler's time."""


class Compactor:
    """Works on one tree and its pool. Scheduler thread only, between two batches."""

    def __init__(
        self,
        cold: ColdPrefixes,
        allocator: ElasticAllocator,
        fence: ForwardFence,
        settings: Settings,
    ) -> None:
        self.totals = CompactionTotals()
        self._cold = cold
        self._allocator = allocator
        self._pool: ElasticKVPool = allocator.get_kvcache()
        self._map = allocator.page_map
        self._fence = fence
        self._pages_per_step = max(1, settings.compact_bytes_per_step // self._map.page_bytes)
        self._nodes_per_step = settings.cold_scan_nodes_per_step
        self._work_by(cold.last_look)

    def empty(self, extents: int, lent: set[int]) -> None:
        """Take a step towards so many more free extents, of those that cost the least to move.

        lent: extents that are lent, or are about to be, into which nothing is moved. Evicts what is
        cold to make room for what is moved.
        """
        began_s = time.perf_counter()
        if self._look.root is not self._cold.last_look.root:
            self._work_by(self._cold.last_look)
        if self._learn():
            self._empty(extents, lent)
        self.totals.seconds += time.perf_counter() - began_s

    def _work_by(self, look: Look) -> None:
        self._look = look
        self._owner = np.full(self._map.pages, NOBODY, dtype=np.int64)
        """Of each page: an index of the look's unused nodes."""
        self._learned = 0
        """So many of them have had their pages noted."""

    def _learn(self) -> bool:
        """Note whose some more pages are. Returns whether that is known of all."""
        nodes = len(self._look.unused)
        end = min(self._learned + self._nodes_per_step, nodes)
        pages, owners = self._pages_of(range(self._learned, end))
        self._owner[pages] = owners
        self._learned = end
        return end == nodes

    def _empty(self, extents: int, lent: set[int]) -> None:
        free = self._allocator.free_mask()
        movable = (self._owner != NOBODY) & ~free
        slots = self._cheapest(free, movable, extents, lent)
        if not slots and self._look is not self._cold.last_look:
            self._work_by(self._cold.last_look)
        moved = 0
        for slot in slots:
            cost = np.count_nonzero(movable[self._map.pages_of(slot)])
            if moved and moved + cost > self._pages_per_step:
                break
            moved += self._empty_one(slot, lent.union(slots))

    def _cheapest(
        self, free: np.ndarray, movable: np.ndarray, extents: int, lent: set[int]
    ) -> list[int]:
        """Extents that cost the least to move, or a little more and lie side by side, as many as
        there is room for."""
        costs = self._map.count_in_each(movable)
        candidates = self._map.wholly_free(free | movable, lent)
        candidates = candidates[costs[candidates] > 0]  # those that are free are no work
        prices = np.full(len(costs), np.inf)
        prices[candidates] = costs[candidates]
        slots = side_by_side(prices, lent, extents, NEIGHBOUR_WORTH * self._map.extent_pages)
        room = len(self._outside(free, lent)) + self._cold.tokens // self._allocator.page_size
        taken = np.cumsum(self._map.count_in_each(free | movable)[slots])
        return slots[: np.count_nonzero(taken <= room)]

    def _empty_one(self, slot: int, kept: set[int]) -> int:
        """Empty an extent, if that still can be, into others than those. Returns pages moved."""
        touched = self._map.pages_of(slot)
        free = self._allocator.free_mask()
        to_move = np.count_nonzero((self._owner[touched] != NOBODY) & ~free[touched])
        missing = (to_move - len(self._outside(free, kept))) * self._allocator.page_size
        if missing > self._cold.tokens:
            return 0
        if missing > 0:
            self.totals.evicted_tokens += self._cold.evict(missing)
            free = self._allocator.free_mask()
        suspects = np.unique(self._owner[touched])
        pages, owners = self._pages_of(suspects[suspects != NOBODY].tolist())
        movable = np.zeros(self._map.pages, dtype=bool)
        movable[pages] = True
        self._owner[touched[~movable[touched]]] = NOBODY  # by now
        sources = touched[movable[touched]]
        targets = self._outside(free, kept)[: len(sources)]
        if len(targets) < len(sources) or slot not in self._map.wholly_free(free | movable, ()):
            return 0
        self._relocate(owners[np.isin(pages, sources)], sources, targets)
        self.totals.moved_pages += len(sources)
        self.totals.emptied_extents += 1
        return len(sources)

    def _outside(self, free: np.ndarray, slots: set[int]) -> np.ndarray:
        """Free pages outside of some extents, int64, low ones first."""
        outside = free.copy()
        for slot in slots:
            outside[self._map.pages_of(slot)] = False
        return np.flatnonzero(outside)

    def _relocate(self, owners: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages behind the forwards in flight, and tell the nodes."""
        pool, device, page_size = self._pool, self._allocator.device, self._allocator.page_size
        self._allocator.take(targets)
        source = torch.from_numpy(sources).to(device)
        target = torch.from_numpy(targets).to(device)

        def copy() -> None:
            pool.raw_pages.index_copy_(0, target, pool.raw_pages.index_select(0, source))

        self._fence.queue(copy)
        now_at = torch.arange(self._map.pages, device=device)
        now_at[source] = target
        for node in (self._look.unused[index] for index in np.unique(owners).tolist()):
            node.value = now_at[node.value // page_size] * page_size + node.value % page_size
        self._owner[targets] = self._owner[sources]
        self._owner[sources] = NOBODY
        self._allocator.give(sources)

    def _pages_of(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Pages of the look's nodes, of those that are unused still, and the index of each one's
        node; int64. Waits for a GPU once."""
        page_size = self._allocator.page_size
        unused = self._look.unused
        indices = [index for index in indices if self._cold.is_unused(unused[index])]
        if not indices:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        starts = [unused[index].value[::page_size] for index in indices]
        pages = (torch.cat(starts) // page_size).cpu().numpy()
        return pages, np.repeat(indices, [len(start) for start in starts])
