"""Empty extents of the KV pool, so that they can be lent: evict cold leaves, move pages.

After hours of service hardly an extent is free from end to end, however much of the pool is. A
page of a prefix that no request uses can be moved: its bytes are copied, and its node in the tree
is told. What a request uses, or a transfer, stays where it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from sglang.srt.swiftcache.forward_fence import ForwardFence

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode


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
        tree: RadixCache,
        allocator: ElasticAllocator,
        fence: ForwardFence,
        bytes_per_step: int,
    ) -> None:
        self.totals = CompactionTotals()
        self._tree = tree
        self._allocator = allocator
        self._pool: ElasticKVPool = allocator.get_kvcache()
        self._fence = fence
        self._pages_per_step = max(1, bytes_per_step // allocator.page_map.page_bytes)

    def cold_tokens(self, older_than_s: float) -> int:
        """Tokens of nodes that no request uses, last asked for before that (monotonic) time.

        Nodes are asked for with all their ancestors, so the cold ones are leaves and, once those
        are gone, leaves again. Costs in proportion to the nodes.
        """
        return sum(
            len(node.value) for node in self._unused() if node.last_access_time < older_than_s
        )

    def empty(self, extents: int, lent: set[int], cold_tokens: int) -> None:
        """Empty up to so many extents, of those that cost the least to move, in a bounded step.

        lent: extents that are lent, or are about to be, into which nothing is moved. Evicts at
        most ``cold_tokens`` to make room for what is moved.
        """
        began_s = time.perf_counter()
        plan = self._plan(extents, lent)
        missing = plan.missing_pages * self._allocator.page_size
        if missing and cold_tokens:
            evicted = self._tree.evict(EvictParams(num_tokens=min(missing, cold_tokens)))
            self.totals.evicted_tokens += evicted.num_tokens_evicted
            plan = self._plan(extents, lent)
        self._move(plan)
        self.totals.seconds += time.perf_counter() - began_s

    def _plan(self, extents: int, lent: set[int]) -> _Plan:
        page_map = self._allocator.page_map
        free = self._allocator.free_mask()
        nodes = list(self._unused())
        pages, owners = self._pages_of(nodes)
        movable = np.zeros(page_map.pages, dtype=bool)
        movable[pages] = True
        held = np.zeros(page_map.pages, dtype=bool)
        held[page_map.held] = True
        candidates = page_map.wholly_free(free | movable, lent)
        costs = np.array(
            [np.count_nonzero(movable[page_map.pages_of(slot)]) for slot in candidates], dtype=int
        )
        order = np.argsort(costs, kind="stable")
        # Those that are free already cost nothing, and are no work.
        order = order[costs[order] > 0][:extents]
        outside = free & ~held
        for slot in (*candidates[order].tolist(), *lent):
            outside[page_map.pages_of(slot)] = False
        return _Plan(
            nodes=nodes,
            pages=pages,
            owners=owners,
            movable=movable,
            slots=candidates[order].tolist(),
            targets=np.flatnonzero(outside),
            missing_pages=max(0, int(costs[order].sum()) - int(np.count_nonzero(outside))),
        )

    def _move(self, plan: _Plan) -> None:
        page_map = self._allocator.page_map
        sources: list[np.ndarray] = []
        moved = 0
        for slot in plan.slots:
            touched = page_map.pages_of(slot)
            inside = touched[plan.movable[touched]]
            if moved and moved + len(inside) > self._pages_per_step:
                break
            if moved + len(inside) > len(plan.targets):
                break
            plan.movable[inside] = False  # a page across an edge is moved once
            sources.append(inside)
            moved += len(inside)
            self.totals.emptied_extents += 1
        if not moved:
            return
        self._relocate(plan, np.concatenate(sources), plan.targets[:moved])
        self.totals.moved_pages += moved

    def _relocate(self, plan: _Plan, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy pages behind the forwards in flight, and tell the nodes."""
        pool, device, page_size = self._pool, self._allocator.device, self._allocator.page_size
        self._allocator.take(targets)
        source = torch.from_numpy(sources).to(device)
        target = torch.from_numpy(targets).to(device)

        def copy() -> None:
            pool.raw_pages.index_copy_(0, target, pool.raw_pages.index_select(0, source))

        self._fence.queue(copy)
        now_at = torch.arange(self._allocator.page_map.pages, device=device)
        now_at[source] = target
        for index in np.unique(plan.owners[np.isin(plan.pages, sources)]).tolist():
            value = plan.nodes[index].value
            plan.nodes[index].value = now_at[value // page_size] * page_size + value % page_size
        self._allocator.give(sources)

    def _pages_of(self, nodes: list[TreeNode]) -> tuple[np.ndarray, np.ndarray]:
        """Pages of nodes, and for each the index of its node; int64. Waits for a GPU once."""
        if not nodes:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        page_size = self._allocator.page_size
        starts = [node.value[::page_size] for node in nodes]
        pages = (torch.cat(starts) // page_size).cpu().numpy()
        return pages, np.repeat(np.arange(len(nodes)), [len(start) for start in starts])

    def _unused(self) -> Iterator[TreeNode]:
        """Nodes on the device that no request and no transfer uses."""
        busy: set[Any] = set()
        in_transfer = getattr(self._tree, "nodes_in_transfer", None)
        if in_transfer is not None:
            busy = in_transfer()
        stack = list(self._tree.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.lock_ref == 0 and node.value is not None and node not in busy:
                yield node


@dataclass
class _Plan:
    """What would have to move where for some extents to be free."""

    nodes: list[TreeNode]
    pages: np.ndarray
    """All that can be moved, int64, and `owners`: whose each is, an index of `nodes`."""
    owners: np.ndarray
    movable: np.ndarray
    """bool [pages of the pool]"""
    slots: list[int]
    """Extents to empty, the cheapest first."""
    targets: np.ndarray
    """Free pages outside of them, int64, low ones first."""
    missing_pages: int
    """Targets that would be needed beyond those."""
