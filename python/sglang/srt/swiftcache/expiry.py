"""``--swiftcache-ttl``: forget conversations that nobody has gone on with.

A node of the tree that was not used for so long leaves the device and the donors, which makes its
prefix a miss. A use is a request that matches the prefix, or that ends with it; what a request is
using is locked, and never too old; so is what a transfer reads or writes. A node is used whenever
one below it is, so old nodes come in whole subtrees.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from sglang.srt.swiftcache.vacate import descendants

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache
    from sglang.srt.swiftcache.vacate import Vacater

logger = logging.getLogger(__name__)

LOOKS_PER_TTL = 10
LOOK_INTERVAL_MIN_S = 0.5


class Expiry:
    """Works on one tree. Scheduler thread only."""

    def __init__(self, cache: DonorRadixCache, vacater: Vacater, ttl_s: float) -> None:
        self._cache = cache
        self._vacater = vacater
        self._ttl_s = ttl_s
        self._interval_s = max(ttl_s / LOOKS_PER_TTL, LOOK_INTERVAL_MIN_S)
        self._next_s = time.monotonic() + self._interval_s

    def step(self) -> None:
        """Call at every scheduler step; looks ten times in a TTL, at most every half second."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.forget_older_than(now_s - self._ttl_s)

    def forget_older_than(self, used_s: float) -> int:
        """Forget what was last used before ``used_s``, a monotonic time. Returns tokens."""
        cache = self._cache
        nodes = list(descendants(cache.root_node))
        tokens = sum(
            self._forget(node)
            for node in reversed(nodes)  # leaves first
            if node.last_access_time < used_s
        )
        if tokens:
            cache.stats.expired_tokens += tokens
            logger.info(
                "SwiftCache: forgot %d tokens that were not used for %g s",
                tokens,
                self._ttl_s,
                extra={"event": "expired", "tokens": tokens},
            )
        return tokens

    def _forget(self, node: TreeNode) -> int:
        """Take a leaf off the device, the donors and the tree. Returns its tokens, 0 if in use."""
        if node.children or node.lock_ref > 0 or node.host_ref_counter > 0:
            return 0
        tokens = len(node.key)
        if not node.backuped:
            self._cache._evict_regular(node)
            return tokens
        if not node.evicted:
            self._cache._evict_backuped(node)
        # one of the layer window has left the tree by now, where its pages found no new homes
        if node.backuped:
            self._vacater.drop_subtree(node)
        return tokens
