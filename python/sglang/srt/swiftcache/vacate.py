"""Empty the donor blocks whose memory is asked back or whose donor is gone.

A block of which there is a copy elsewhere (``--swiftcache-replicas``) becomes that copy. Any other
block in such memory is moved to another donor if there is room, or if room can be made by
evicting what is colder. Otherwise the copy of a node that is on the device too is forgotten, and a
node that lives on donors alone is dropped with its subtree: a later request misses and recomputes.
No byte is read from the memory after it was given back, so a hit is never wrong.

Two rules of HiCache's tree are kept. A node whose transfer is in flight is left alone until it
has completed. And the nodes with a copy form a prefix of the tree, so copies are forgotten leaf
first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.disaggregation.kv_events import StorageMedium

from swiftcache_tier.blocks import NONE

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

logger = logging.getLogger(__name__)


class Vacater:
    """Works on one tree. Scheduler thread only."""

    def __init__(self, cache: DonorRadixCache) -> None:
        self._cache = cache

    def step(self) -> None:
        """Vacate what can be vacated now, at most ``vacate_bytes_per_step``.

        What a lost donor still holds after ``drain_deadline_s`` goes all at once: no request uses
        it, so it is given up rather than moved. Returns at once when no donor wants memory back,
        which is nearly always.
        """
        pool = self._cache.tier_pool
        doomed = pool.tier.must_vacate()
        if doomed.size == 0:
            return
        busy = self.in_flight()
        if pool.replicas is not None:
            pool.replicas.drop(doomed, keep=self.blocks_in_flight())
        late = doomed[pool.tier.past_deadline(doomed)]
        budget = max(1, pool.settings.vacate_bytes_per_step // pool.block_layout.block_bytes)
        moved = lost = 0
        for node in self._hottest_first(doomed):
            is_late = node.lock_ref == 0 and self._holds(node, late)
            if moved + lost >= budget and not is_late:
                continue
            if node in busy or node.host_ref_counter > 0 or not self._has_copy(node):
                continue
            if not self._use_copies(node, doomed):
                continue
            count = 0 if is_late else self._move(node, doomed)
            moved += count
            if count == 0:
                cause = self._cause(node, doomed)
                given_up = self._give_up(node, busy)
                self._cache.stats.lost_by_cause[cause] += given_up
                lost += given_up
        self._cache.stats.moved_blocks += moved
        if moved or lost:
            logger.info(
                "SwiftCache: %d blocks asked back: moved %d, lost %d in this step",
                doomed.size,
                moved,
                lost,
                extra={
                    "event": "vacated",
                    "asked_blocks": doomed.size,
                    "moved_blocks": moved,
                    "lost_blocks": lost,
                },
            )

    def blocks_in_flight(self) -> set[int]:
        """Donor blocks that a transfer is reading or writing, their copies left aside."""
        pool = self._cache.tier_pool
        blocks: set[int] = set()
        for node in self.in_flight():
            if node.host_value is not None:
                blocks.update(pool.blocks_of(node.host_value).tolist())
        return blocks

    def drop_subtree(self, root: TreeNode) -> bool:
        """Remove a node that lives on donors only, and all below it. False if one is in use."""
        nodes = list(subtree(root))
        if any(not n.evicted or n.host_ref_counter > 0 for n in nodes):
            return False
        cache = self._cache
        for node in nodes:
            self.forget_copy(node)
            cache.evictable_leaves.discard(node)
            cache.evictable_host_leaves.discard(node)
        parent = root.parent
        del parent.children[root.key.child_key(cache.page_size)]
        if parent is not cache.root_node:
            cache._update_leaf_status(parent)
            cache._update_host_leaf_status(parent)
        return True

    def forget_copy(self, node: TreeNode) -> None:
        """Free the donor blocks of a node. One below it that has a copy would be out of reach."""
        if node.host_value is None:
            return
        self._cache._record_remove_event(node, medium=StorageMedium.CPU)
        self._cache.cache_controller.evict_host(node.host_value)
        node.host_value = None

    def _has_copy(self, node: TreeNode) -> bool:
        """False once the node was evicted or dropped to make room for a hotter one."""
        siblings = node.parent.children
        in_tree = siblings.get(node.key.child_key(self._cache.page_size)) is node
        return in_tree and node.host_value is not None

    def _hottest_first(self, doomed: np.ndarray) -> list[TreeNode]:
        """Nodes with copies in these blocks: the hottest get the free blocks, and what they evict
        is colder. Each comes after its ancestors, without which it would be of no use."""
        root = self._cache.root_node
        order: dict[TreeNode, None] = {}
        for node in sorted(subtree(root), key=lambda n: n.last_access_time, reverse=True):
            path = []
            while node is not root and node not in order:
                path.append(node)
                node = node.parent
            order.update(dict.fromkeys(reversed(path)))
        return [node for node in order if self._holds(node, doomed)]

    def _holds(self, node: TreeNode, blocks: np.ndarray) -> bool:
        """Whether a node's copy lies in any of these blocks."""
        if node.host_value is None or blocks.size == 0:
            return False
        return bool(np.isin(self._cache.tier_pool.blocks_of(node.host_value), blocks).any())

    def in_flight(self) -> set[TreeNode]:
        """Nodes whose donor blocks a transfer is reading or writing."""
        cache = self._cache
        busy: set[TreeNode] = set()
        for _, _, nodes in cache.ongoing_write_through.values():
            busy.update(nodes)
        for node in cache.ongoing_load_back.values():
            while node is not cache.root_node and node not in busy:
                busy.add(node)
                node = node.parent
        return busy

    def _use_copies(self, node: TreeNode, doomed: np.ndarray) -> bool:
        """Put a node's copies in the place of its doomed blocks. Returns whether any are left."""
        pool = self._cache.tier_pool
        if pool.replicas is None:
            return True
        blocks = pool.blocks_of(node.host_value)
        inside = np.flatnonzero(np.isin(blocks, doomed))
        copies = pool.replicas.of(blocks[inside]).max(axis=1)  # doomed ones were dropped before
        saved = copies != NONE
        pool.use_copies(blocks[inside[saved]], copies[saved])
        blocks[inside[saved]] = copies[saved]
        node.host_value = pool.slots_of(blocks)
        self._cache.stats.blocks_saved_by_copies += int(np.count_nonzero(saved))
        return not saved.all()

    def _cause(self, node: TreeNode, doomed: np.ndarray) -> str:
        """Why a node's doomed blocks go, as `TierStats` names it."""
        tier = self._cache.tier_pool.tier
        blocks = self._cache.tier_pool.blocks_of(node.host_value)
        donors = tier.donor_of(blocks[np.isin(blocks, doomed)]).tolist()
        return "reclaimed" if tier.lost_donors().isdisjoint(donors) else "donor_lost"

    def _move(self, node: TreeNode, doomed: np.ndarray) -> int:
        """Copy a node's doomed blocks elsewhere. Returns how many, 0 if there is no room."""
        pool = self._cache.tier_pool
        blocks = pool.blocks_of(node.host_value)
        inside = np.isin(blocks, doomed)
        count = int(np.count_nonzero(inside))
        targets = pool.tier.alloc(count)
        if targets is None:
            self._evict_colder(node, count)
            self._make_room_for(count)
            targets = pool.tier.alloc(count)
        if targets is None:
            return 0
        sources = blocks[inside]
        pool.copy_blocks(sources, targets)
        blocks[inside] = targets
        node.host_value = pool.slots_of(blocks)
        self._blocks_moved(sources, targets)
        pool.tier.free(sources)
        return count

    def _make_room_for(self, count: int) -> None:
        """More than evicting can be done by a tier that uses blocks for more than copies."""

    def _blocks_moved(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """For whoever else knows blocks by their ids."""

    def _evict_colder(self, node: TreeNode, count: int) -> None:
        """LRU-evict donor blocks, with the node itself out of reach."""
        cache, tier = self._cache, self._cache.tier_pool.tier
        node.protect_host()
        try:
            # what is evicted may lie in memory that is asked back too, and makes no room then
            while tier.free_blocks < count:
                used = tier.used_blocks
                cache.evict_host((count - tier.free_blocks) * cache.page_size)
                if tier.used_blocks == used:
                    break
        finally:
            node.release_host()

    def _give_up(self, node: TreeNode, busy: set[TreeNode]) -> int:
        """Forget the copies of a node and of all below it. Returns the blocks lost, 0 if busy."""
        nodes = list(subtree(node))
        if any(n in busy or n.host_ref_counter > 0 for n in nodes):
            return 0
        tokens: int = sum(len(n.host_value) for n in nodes if n.host_value is not None)
        if node.evicted:
            self.drop_subtree(node)
        else:
            for below in nodes:
                if below.evicted and not below.parent.evicted:
                    self.drop_subtree(below)
            for below in reversed(nodes):
                if not below.evicted and below.host_value is not None:
                    self.forget_copy(below)
                    self._cache._update_host_leaf_status(below)
        return tokens // self._cache.tier_pool.page_size


def subtree(root: TreeNode) -> Iterator[TreeNode]:
    """The node and all below it, parents first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
