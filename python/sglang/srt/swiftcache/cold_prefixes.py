"""What of the prefix cache nobody has asked for lately, which may make room for lending.

A tree of tens of thousands of nodes takes a tenth of a second to look through, and no request is to
wait for that: so it is looked through a slice at a time, and what has changed since a node was seen
is found out when it matters.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from swiftcache_tier.settings import Settings

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode


@dataclass
class Look:
    """One look through the tree. Its nodes may have been used, evicted or split since."""

    root: TreeNode
    """Another one means that the tree was flushed."""
    cold_before_s: float
    unused: list[TreeNode] = field(default_factory=list)
    """On the device and nobody's: what could be moved."""
    cold: dict[TreeNode, int] = field(default_factory=dict)
    """Those of them last asked for before that (monotonic) time, and their tokens."""
    tokens: int = 0
    """Of the cold ones."""
    oldest: list[tuple[float, int, TreeNode]] = field(default_factory=list)
    """A heap of the cold leaves: when each was asked for, and its id."""

    def add(self, node: TreeNode, is_leaf: bool) -> None:
        self.unused.append(node)
        if node.last_access_time < self.cold_before_s:
            self.cold[node] = len(node.key)
            self.tokens += len(node.key)
            if is_leaf:
                self.push(node)

    def push(self, leaf: TreeNode) -> None:
        heapq.heappush(self.oldest, (leaf.last_access_time, leaf.id, leaf))

    def forget(self, node: TreeNode) -> None:
        """It is not cold any more."""
        self.tokens -= self.cold.pop(node, 0)


class ColdPrefixes:
    """Of one tree. Scheduler thread only, between two batches.

    A node is asked for with all its ancestors, so the cold ones are leaves and, once those are
    gone, leaves again.
    """

    def __init__(self, tree: RadixCache, allocator: ElasticAllocator, settings: Settings) -> None:
        self._tree = tree
        self._allocator = allocator
        self._settings = settings
        self._last = self._ahead = Look(tree.root_node, 0.0)
        self._stack: list[TreeNode] = []
        """What the look ahead has still to see."""
        self._next_s = 0.0

    @property
    def last_look(self) -> Look:
        """The last that was completed; an empty one after a flush."""
        root = self._tree.root_node
        if self._last.root is not root:
            self._last = self._ahead = Look(root, 0.0)
            self._stack = []
            self._next_s = 0.0
        return self._last

    @property
    def tokens(self) -> int:
        """What is cold, less what was evicted or asked for since it was seen."""
        self._oldest()
        return self._last.tokens

    def look(self, now_s: float) -> None:
        """See so many nodes more, or begin another look when it is time."""
        root = self.last_look.root
        if not self._stack:
            if now_s < self._next_s:
                return
            self._next_s = now_s + self._settings.cold_scan_s
            self._ahead = Look(root, now_s - self._settings.cold_after_s)
            self._stack = list(root.children.values())
        for _ in range(self._settings.cold_scan_nodes_per_step):
            if not self._stack:
                break
            node = self._stack.pop()
            self._stack.extend(node.children.values())
            if self.is_unused(node):
                self._ahead.add(node, node in self._tree.evictable_leaves)
        if not self._stack:
            self._last = self._ahead

    def is_unused(self, node: TreeNode) -> bool:
        """Whether a node that was in the tree still is, on the device, and used by nobody.

        Requests lock what they use, and so do loads and stores until they have ended.
        """
        if node.lock_ref > 0 or node.value is None:
            return False
        # SGLang leaves a node that was evicted as it was, but without children and of no set.
        return node in self._tree.evictable_leaves or bool(node.children)

    def note_use(self, node: TreeNode) -> None:
        """A request goes on from here: neither the node is cold nor what it hangs on."""
        looks = (self.last_look, self._ahead)
        for below in node.children.values() if len(node.children) == 1 else ():
            # Split by the match: SGLang counts the whole as used.
            if below.last_access_time >= self._last.cold_before_s:
                for look in looks:
                    look.forget(below)
        while node is not self._last.root:
            for look in looks:
                look.forget(node)
            node = node.parent

    def evict(self, tokens: int) -> int:
        """Evict what is cold until ``tokens`` are free, the oldest first. Returns how many are.

        By the time of the last use alone: --radix-eviction-policy may mean to keep what is cold.
        """
        evicted = 0
        self._allocator.free_group_begin()
        try:
            while evicted < tokens and (leaf := self._oldest()) is not None:
                evicted += self._evict_leaf(leaf)
                self._forget_oldest()
        finally:
            self._allocator.free_group_end()
        return evicted

    def _oldest(self) -> TreeNode | None:
        """The leaf that is to go first. Forgets those before it that were evicted or asked for."""
        look = self.last_look
        while look.oldest:
            used_s, _, leaf = look.oldest[0]
            if leaf.last_access_time > used_s:
                heapq.heappop(look.oldest)
                self.note_use(leaf)
            elif leaf in look.cold and self.is_unused(leaf):
                return leaf
            else:
                self._forget_oldest()
        return None

    def _forget_oldest(self) -> None:
        """After which its parent may be the leaf, or be gone too."""
        look = self._last
        _, _, leaf = heapq.heappop(look.oldest)
        look.forget(leaf)
        above = leaf.parent
        is_leaf = above in self._tree.evictable_leaves
        if above in look.cold and (is_leaf or not self.is_unused(above)):
            look.push(above)

    def _evict_leaf(self, leaf: TreeNode) -> int:
        """Have the tree evict a leaf. Returns its tokens, 0 if it has to stay."""
        tree = self._tree
        leaves = tree.evictable_leaves
        if leaf not in leaves:
            return 0
        tree.evictable_leaves = {leaf}  # of which its policy cannot choose another
        try:
            evicted: int = tree.evict(EvictParams(num_tokens=1)).num_tokens_evicted
        finally:
            leaves.discard(leaf)
            leaves |= tree.evictable_leaves  # its parent, or the leaf where it was not evicted
            tree.evictable_leaves = leaves
        return evicted
