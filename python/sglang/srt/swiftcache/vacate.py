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

import heapq
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from sglang.srt.disaggregation.kv_events import StorageMedium

from swiftcache_tier.blocks import NONE

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

logger = logging.getLogger(__name__)

# Looking through the tree takes no more of the scheduler's time.
LOOKING_SHARE = 0.01

_NO_BLOCKS = np.empty(0, dtype=np.int64)


@dataclass
class _Step:
    """Blocks, in one step. What was asked back was moved, saved or lost, or is left for later."""

    moved: int = 0
    saved: int = 0
    """Of which a copy is used now."""
    lost: int = 0
    lost_beside: int = 0
    """Not asked back, and lost with what was: of the same nodes, and below them."""

    @property
    def worked_on(self) -> int:
        return self.moved + self.lost + self.lost_beside


class Vacater:
    """Works on one tree. Scheduler thread only."""

    def __init__(self, cache: DonorRadixCache) -> None:
        self._cache = cache
        self._root = cache.root_node
        self._queue: deque[TreeNode] = deque()
        """Nodes in memory that is to be vacated, as of the last look through the tree."""
        self._left = 0
        """Blocks that were still to be vacated after the last step."""
        self._step = _Step()
        self._progressed = False
        self._look_again_s = 0.0

    def step(self) -> None:
        """Vacate what can be vacated now, at most ``vacate_bytes_per_step``.

        What a lost donor still holds after ``drain_deadline_s`` goes all at once: no request uses
        it, so it is given up rather than moved. Returns at once when no donor wants memory back,
        which is nearly always. The tree is looked through once for what is asked back, not at
        every step.
        """
        pool = self._cache.tier_pool
        doomed = pool.tier.must_vacate()
        if doomed.size == 0:
            self._queue.clear()
            self._left = 0
            return
        doomed = np.sort(doomed)
        busy = self.in_flight()
        if pool.replicas is not None:
            pool.replicas.drop(doomed, keep=self.blocks_in_flight())
        self._look(doomed)
        late = doomed[pool.tier.past_deadline(doomed)]
        budget = max(1, pool.settings.vacate_bytes_per_step // pool.block_layout.block_bytes)
        done = self._step = _Step()
        waiting = []
        while self._queue and (done.worked_on < budget or late.size):
            node = self._queue.popleft()
            if not self._holds(node, doomed) or not self._is_in_tree(node):
                continue
            is_late = node.lock_ref == 0 and self._holds(node, late)
            is_over = done.worked_on >= budget and not is_late
            if is_over or node in busy or node.host_ref_counter > 0:
                waiting.append(node)
                continue
            if not self._use_copies(node, doomed):
                continue
            count = 0 if is_late else self._move(node, doomed)
            done.moved += count
            if count == 0:
                cause = self._cause(node, doomed)
                given_up = self._give_up(node, busy)
                self._count_lost(given_up, doomed, cause)
                if given_up.size == 0:
                    waiting.append(node)
        self._queue.extendleft(reversed(waiting))
        self._left = pool.tier.must_vacate().size
        self._progressed = done.worked_on > 0
        self._cache.stats.moved_blocks += done.moved
        if done.lost:
            self._cache.note_without_copy()
        if done.worked_on:
            _log(doomed.size, done)

    def _count_lost(self, blocks: np.ndarray, doomed: np.ndarray, cause: str) -> None:
        """``blocks`` were given up because some of them, or of those above them, are doomed."""
        asked = int(np.count_nonzero(_are_in(blocks, doomed)))
        self._step.lost += asked
        self._step.lost_beside += blocks.size - asked
        self._cache.stats.lost_by_cause[cause] += blocks.size

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

    def _look(self, doomed: np.ndarray) -> None:
        """Find the nodes again if more is asked back, or if all that were found are done with.

        What is left then lies in nodes that were split meanwhile, or is no node's.
        """
        now_s = time.monotonic()
        if self._cache.root_node is not self._root:  # the tree was flushed
            self._root = self._cache.root_node
            self._queue.clear()
        is_due = not self._queue and (self._progressed or now_s >= self._look_again_s)
        if is_due or doomed.size > self._left:
            self._queue = deque(self._hottest_first(doomed))
            spent_s = time.monotonic() - now_s
            self._look_again_s = now_s + spent_s / LOOKING_SHARE

    def _hottest_first(self, doomed: np.ndarray) -> list[TreeNode]:
        """Nodes with copies in these blocks, ascending ids: the hottest get the free blocks, and
        what they evict is colder. Each comes after its ancestors, without which it is of no use."""
        pool, root = self._cache.tier_pool, self._cache.root_node
        nodes = [n for n in descendants(root) if n.host_value is not None]
        if not nodes:
            return []
        copies = [pool.blocks_of(node.host_value) for node in nodes]
        starts = np.cumsum([0, *(len(blocks) for blocks in copies[:-1])])
        inside = np.logical_or.reduceat(_are_in(np.concatenate(copies), doomed), starts)
        found = {node for node, holds in zip(nodes, inside.tolist(), strict=True) if holds}
        order: dict[TreeNode, None] = {}
        for node in sorted(found, key=lambda n: n.last_access_time, reverse=True):
            path = []
            while node is not root and node not in order:
                path.append(node)
                node = node.parent
            order.update(dict.fromkeys(reversed(path)))
        return [node for node in order if node in found]

    def _holds(self, node: TreeNode, blocks: np.ndarray) -> bool:
        """Whether a node's copy lies in any of these blocks, ascending ids."""
        if node.host_value is None or blocks.size == 0:
            return False
        return bool(_are_in(self._cache.tier_pool.blocks_of(node.host_value), blocks).any())

    def _is_in_tree(self, node: TreeNode) -> bool:
        """False once the node was evicted or dropped to make room for a hotter one."""
        return node.parent.children.get(node.key.child_key(self._cache.page_size)) is node

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
        inside = np.flatnonzero(_are_in(blocks, doomed))
        copies = pool.replicas.of(blocks[inside]).max(axis=1)  # doomed ones were dropped before
        saved = copies != NONE
        pool.use_copies(blocks[inside[saved]], copies[saved])
        blocks[inside[saved]] = copies[saved]
        node.host_value = pool.slots_of(blocks)
        count = int(np.count_nonzero(saved))
        self._step.saved += count
        self._cache.stats.blocks_saved_by_copies += count
        return not saved.all()

    def _cause(self, node: TreeNode, doomed: np.ndarray) -> str:
        """Why a node's doomed blocks go, as `TierStats` names it."""
        tier = self._cache.tier_pool.tier
        blocks = self._cache.tier_pool.blocks_of(node.host_value)
        donors = tier.donor_of(blocks[_are_in(blocks, doomed)]).tolist()
        return "reclaimed" if tier.lost_donors().isdisjoint(donors) else "donor_lost"

    def _move(self, node: TreeNode, doomed: np.ndarray) -> int:
        """Copy a node's doomed blocks elsewhere. Returns how many, 0 if there is no room."""
        pool = self._cache.tier_pool
        blocks = pool.blocks_of(node.host_value)
        inside = _are_in(blocks, doomed)
        count = int(np.count_nonzero(inside))
        targets = pool.tier.alloc(count)
        if targets is None:
            self._evict_colder(node, count, doomed)
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

    def _evict_colder(self, node: TreeNode, count: int, doomed: np.ndarray) -> None:
        """Evict from the donors what was used before a node, until so many blocks are free.

        What lies in memory that is asked back too makes no room. It is given up all the same: if
        there is none for the node, there will be none for what is colder.
        """
        cache, tier = self._cache, self._cache.tier_pool.tier
        heap = [(leaf.last_access_time, leaf.id, leaf) for leaf in cache.evictable_host_leaves]
        heapq.heapify(heap)
        while tier.free_blocks < count and heap:
            used_s, _, leaf = heapq.heappop(heap)
            if used_s >= node.last_access_time:
                return
            if leaf is cache.root_node or leaf.children or not leaf.evicted:
                continue
            cause = self._cause(leaf, doomed) if self._holds(leaf, doomed) else None
            blocks = cache.tier_pool.blocks_of(leaf.host_value)
            if not self.drop_subtree(leaf):
                continue
            if cause is not None:
                self._count_lost(blocks, doomed, cause)
            parent = leaf.parent
            if parent in cache.evictable_host_leaves:
                heapq.heappush(heap, (parent.last_access_time, parent.id, parent))

    def _give_up(self, node: TreeNode, busy: set[TreeNode]) -> np.ndarray:
        """Forget the copies of a node and of all below it.

        Returns the blocks that held them, none if a node is busy.
        """
        nodes = list(subtree(node))
        if any(n in busy or n.host_ref_counter > 0 for n in nodes):
            return _NO_BLOCKS
        lost = self._blocks_of(nodes)
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
        return lost

    def _blocks_of(self, nodes: list[TreeNode]) -> np.ndarray:
        """The blocks of the nodes' copies."""
        copies = [node.host_value for node in nodes if node.host_value is not None]
        return np.concatenate([_NO_BLOCKS, *map(self._cache.tier_pool.blocks_of, copies)])


def _log(asked: int, done: _Step) -> None:
    left = asked - done.moved - done.lost - done.saved
    logger.info(
        "SwiftCache: %d blocks asked back: moved %d, lost %d, saved %d by copies, left %d for "
        "later; lost %d beside them",
        asked,
        done.moved,
        done.lost,
        done.saved,
        left,
        done.lost_beside,
        extra={
            "event": "vacated",
            "asked_blocks": asked,
            "moved_blocks": done.moved,
            "lost_blocks": done.lost,
            "saved_blocks": done.saved,
            "left_blocks": left,
            "lost_beside_blocks": done.lost_beside,
        },
    )


def _are_in(blocks: np.ndarray, some: np.ndarray) -> np.ndarray:
    """Which of ``blocks`` are among ``some``, ascending and not empty: bool [len(blocks)]."""
    places = np.searchsorted(some, blocks)
    places[places == len(some)] = 0
    found: np.ndarray = some[places] == blocks
    return found


def subtree(root: TreeNode) -> Iterator[TreeNode]:
    """The node and all below it, parents first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def descendants(root: TreeNode) -> Iterator[TreeNode]:
    """All nodes below one, parents first."""
    nodes = subtree(root)
    next(nodes)
    return nodes
