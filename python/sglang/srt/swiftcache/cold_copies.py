"""Which nodes on the device have a copy on donors, where there is no room for copies of all.

HiCache stores what has been computed at once, and evicts for it what lies in the host tier alone.
That asks for a tier that is larger than the device pool: a smaller one ends up full of copies of
what the device has too, and nothing is ever restored. Donors lend what they can spare. So a full
tier takes no copy of what has just been computed, unless it has room for twice what is on the
device. Half of it is for copies of the nodes that the device would evict next, made shortly before
it does; the other half is for what it has evicted.
"""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING

from sglang.srt.swiftcache.vacate import Vacater, subtree

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

# Looking through the tree takes no more of the scheduler's time.
LOOKING_SHARE = 0.01
LOOK_INTERVAL_MIN_S = 0.1


class ColdCopies:
    """Works on one tree with a write-through policy. Scheduler thread only."""

    def __init__(self, cache: DonorRadixCache, vacater: Vacater) -> None:
        self._cache = cache
        self._vacater = vacater
        self._refused = False
        """Something on the device was refused a copy, and may have none yet."""
        self._not_before_s = 0.0

    def admits(self, tokens: int) -> bool:
        """Whether a copy of ``tokens`` that have just been computed is to be made now."""
        ample = self._tier_tokens() >= 2 * self._tokens_on_device()
        if ample or self._cache.tier_pool.has_room(tokens):
            return True
        self._refused = True
        return False

    def step(self) -> None:
        """Call at every scheduler step. Returns at once while nothing is without a copy, or
        no donor is there."""
        now_s = time.monotonic()
        if not self._refused or now_s < self._not_before_s or self._tier_tokens() == 0:
            return
        self.store_coldest()
        spent_s = time.monotonic() - now_s
        self._not_before_s = now_s + max(LOOK_INTERVAL_MIN_S, spent_s / LOOKING_SHARE)

    def store_coldest(self) -> None:
        """Store the coldest nodes on the device that have no copy, for half of the tier at most.

        In one call at most ``cold_copy_bytes_per_step``, coldest first.
        """
        cache, pool = self._cache, self._cache.tier_pool
        nodes = [n for n in subtree(cache.root_node) if n.value is not None and n.parent]
        self._refused = any(not n.backuped for n in nodes)
        nodes.sort(key=lambda n: n.last_access_time)
        left = min(self._tier_tokens() // 2, self._tokens_on_device())
        cold = 0
        while cold < len(nodes) and left > 0:
            left -= len(nodes[cold].value)
            cold += 1
        spare = _SpareCopies(nodes[cold:], self._vacater)
        budget = pool.settings.cold_copy_bytes_per_step // pool.block_layout.block_bytes
        budget = max(1, budget) * pool.page_size
        for node in nodes[:cold]:
            # nodes with a copy form a prefix of the tree
            for missing in reversed(self._without_copy(node)):
                if budget <= 0 or not self._store(missing, spare):
                    return
                budget -= len(missing.value)

    def _without_copy(self, node: TreeNode) -> list[TreeNode]:
        """The node and its ancestors, as far as they are to be stored; empty if one is not yet."""
        found = []
        while node is not self._cache.root_node and not node.backuped:
            # as with write-through: not while it is being computed, or used too seldom
            if node.hit_count < self._cache.write_through_threshold:
                return []
            found.append(node)
            node = node.parent
        return found

    def _store(self, node: TreeNode, spare: _SpareCopies) -> bool:
        cache, pool = self._cache, self._cache.tier_pool
        tokens = len(node.value)
        while not pool.has_room(tokens):
            forgotten = spare.forget_one()
            cache.stats.forgotten_copy_tokens += forgotten
            if forgotten == 0:
                break  # what is on donors alone is evicted, then
        stored = cache.store_copy(node)
        cache.stats.cold_copy_tokens += stored
        return stored > 0

    def _tier_tokens(self) -> int:
        """What the tier has room for."""
        pool = self._cache.tier_pool
        return pool.tier.total_blocks * pool.page_size // pool.copies_wanted

    def _tokens_on_device(self) -> int:
        evictable: int = self._cache.evictable_size()
        protected: int = self._cache.protected_size()
        return evictable + protected


class _SpareCopies:
    """Copies of nodes that stay on the device for long: to be forgotten, the hottest first."""

    def __init__(self, nodes: list[TreeNode], vacater: Vacater) -> None:
        self._vacater = vacater
        self._busy = vacater.in_flight()
        self._nodes = set(nodes)
        self._heap = [(-n.last_access_time, n.id, n) for n in nodes if n.backuped]
        heapq.heapify(self._heap)

    def forget_one(self) -> int:
        """Returns the tokens of a copy that was forgotten, 0 if there is none to forget."""
        while self._heap:
            _, _, node = heapq.heappop(self._heap)
            in_use = node in self._busy or node.host_ref_counter > 0
            # one that hangs on it could not be reached any more, on the donors
            if not node.backuped or in_use or any(n.backuped for n in node.children.values()):
                continue
            tokens = len(node.host_value)
            self._vacater.forget_copy(node)
            if node.parent in self._nodes:
                heapq.heappush(
                    self._heap, (-node.parent.last_access_time, node.parent.id, node.parent)
                )
            return tokens
        return 0
