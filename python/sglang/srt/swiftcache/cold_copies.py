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

from sglang.srt.swiftcache.vacate import LOOKING_SHARE, Vacater, descendants

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

LOOK_INTERVAL_MIN_S = 0.1


class ColdCopies:
    """Works on one tree with a write-through policy. Scheduler thread only."""

    def __init__(self, cache: DonorRadixCache, vacater: Vacater) -> None:
        self._cache = cache
        self._vacater = vacater
        self._some_without = False
        """Something on the device may have no copy."""
        self._not_before_s = 0.0

    def admits(self, tokens: int) -> bool:
        """Whether a copy of ``tokens`` that have just been computed is to be made now."""
        ample = self._tier_tokens() >= 2 * self._tokens_on_device()
        if ample or self._cache.tier_pool.has_room(tokens):
            return True
        self.note_without_copy()
        return False

    def note_without_copy(self) -> None:
        """Something on the device has no copy, or no longer has."""
        self._some_without = True

    def step(self) -> None:
        """Call at every scheduler step. Returns at once while nothing is without a copy, or
        no donor is there."""
        now_s = time.monotonic()
        if not self._some_without or now_s < self._not_before_s or self._tier_tokens() == 0:
            return
        self.store_coldest()
        spent_s = time.monotonic() - now_s
        self._not_before_s = now_s + max(LOOK_INTERVAL_MIN_S, spent_s / LOOKING_SHARE)

    def store_coldest(self) -> None:
        """Store the coldest nodes on the device that have no copy, for half of the tier at most.

        In one call at most ``cold_copy_bytes_per_step``, coldest first, and no more than a quarter
        of what is on the device: what is being stored cannot be evicted.
        """
        cache, pool = self._cache, self._cache.tier_pool
        tree = list(descendants(cache.root_node))
        nodes = [n for n in tree if not n.evicted]
        self._some_without = any(not n.backuped for n in nodes)
        nodes.sort(key=cache.eviction_strategy.get_priority)
        cold = self._coldest(nodes, min(self._tier_tokens() // 2, self._tokens_on_device()))
        spare = _SpareCopies([n for n in nodes if n not in cold], self._vacater)
        room = spare.tokens + pool.available_size()
        room += sum(len(n.host_value) for n in tree if n.evicted and n.host_ref_counter == 0)
        budget = pool.settings.cold_copy_bytes_per_step // pool.block_layout.block_bytes
        budget = max(1, min(budget * pool.page_size, self._tokens_on_device() // 4))
        for node in cold:
            # what could not succeed is not to cost others their copies
            if not self._is_to_be_stored(node) or len(node.value) > room:
                continue
            if budget <= 0:
                return
            stored = self._store(node, spare)
            budget -= stored
            room -= stored

    def _coldest(self, nodes: list[TreeNode], tokens: int) -> dict[TreeNode, None]:
        """The first of ``nodes`` that have ``tokens`` together, each after its ancestors.

        A copy is of no use without those of the ancestors, so they count. Of a node that is too
        long as a whole the head is taken, which becomes a node of its own.
        """
        cold: dict[TreeNode, None] = {}
        # no crumbs: each is a node that the tree keeps
        least = max(self._cache.load_back_threshold, tokens // 8)
        for node in nodes:
            path = []
            above = node
            while above is not self._cache.root_node and above not in cold:
                path.append(above)
                above = above.parent
            size = sum(len(n.value) for n in path)
            if size > tokens:
                head = self._head(node, tokens, least) if len(path) == 1 else None
                if head is None:
                    continue
                path, size = [head], len(head.value)
            cold.update(dict.fromkeys(reversed(path)))
            tokens -= size
        return cold

    def _head(self, node: TreeNode, tokens: int, least: int) -> TreeNode | None:
        """Split the first ``tokens`` off a node, whole pages, to be stored. None if it is not, or
        if they are fewer than ``least``."""
        tokens -= tokens % self._cache.page_size
        if tokens < least or node.lock_ref > 0 or not self._is_to_be_stored(node):
            return None
        head: TreeNode = self._cache._split_node(node.key, node, tokens)
        return head

    def _is_to_be_stored(self, node: TreeNode) -> bool:
        """As with write-through: not while it is being computed, nor if it is used too seldom, nor
        before its ancestors."""
        above = node.parent
        return (
            not node.backuped
            and node.hit_count >= self._cache.write_through_threshold
            and (above is self._cache.root_node or above.backuped)
        )

    def _store(self, node: TreeNode, spare: _SpareCopies) -> int:
        """Returns the tokens, 0 if there is no room and none can be made."""
        cache, pool = self._cache, self._cache.tier_pool
        tokens = len(node.value)
        while not pool.has_room(tokens):
            forgotten = spare.forget_one()
            cache.stats.forgotten_copy_tokens += forgotten
            if forgotten == 0:
                break  # what is on donors alone is evicted, then
        stored = cache.store_copy(node)
        cache.stats.cold_copy_tokens += stored
        return stored

    def _tier_tokens(self) -> int:
        """What the tier has room for."""
        pool = self._cache.tier_pool
        return pool.tier.total_blocks * pool.page_size // pool.copies_wanted

    def _tokens_on_device(self) -> int:
        evictable: int = self._cache.evictable_size()
        protected: int = self._cache.protected_size()
        return evictable + protected


class _SpareCopies:
    """Copies of nodes that stay on the device for long: to be forgotten, the last node first."""

    def __init__(self, nodes: list[TreeNode], vacater: Vacater) -> None:
        self._vacater = vacater
        self._busy = vacater.in_flight()
        self._rank = {node: -place for place, node in enumerate(nodes)}
        self._heap = [(self._rank[n], n) for n in nodes if n.backuped]
        heapq.heapify(self._heap)
        self.tokens = sum(len(node.host_value) for _, node in self._heap)
        """In all, at the beginning."""

    def forget_one(self) -> int:
        """Returns the tokens of a copy that was forgotten, 0 if there is none to forget."""
        while self._heap:
            _, node = heapq.heappop(self._heap)
            in_use = node in self._busy or node.host_ref_counter > 0
            # one that hangs on it could not be reached any more, on the donors
            if not node.backuped or in_use or any(n.backuped for n in node.children.values()):
                continue
            tokens = len(node.host_value)
            self._vacater.forget_copy(node)
            if node.parent in self._rank:
                heapq.heappush(self._heap, (self._rank[node.parent], node.parent))
            return tokens
        return 0
