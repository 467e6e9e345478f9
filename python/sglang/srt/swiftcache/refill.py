"""``--swiftcache-replicas``: give blocks back the copies that a lost donor took with it.

Blocks are short of a copy after a donor was lost or left, or when they were stored while there were
too few donors. A bounded part of them is copied at each scheduler step, into room that is free:
nothing is evicted for it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache
    from sglang.srt.swiftcache.vacate import Vacater
    from swiftcache_tier.blocks import Replicas

logger = logging.getLogger(__name__)


class Refiller:
    """Works on one pool. Scheduler thread only."""

    def __init__(self, pool: DonorKVCache, vacater: Vacater, replicas: Replicas) -> None:
        self._pool = pool
        self._vacater = vacater
        self._replicas = replicas
        self._not_before_s = 0.0
        self.blocks = 0
        """Copies that were made, in all."""

    def step(self) -> None:
        """Copy some. Returns at once when no block is short of a copy, which is nearly always."""
        if self._replicas.short == 0:
            return
        now_s = time.monotonic()
        if now_s < self._not_before_s or self._pool.tier.free_blocks == 0:
            return
        settings = self._pool.settings
        most = max(1, settings.refill_bytes_per_step // self._pool.block_layout.block_bytes)
        # A store that is in flight has not written what would be copied.
        refill = self._replicas.refill(most, self._vacater.blocks_in_flight())
        if len(refill.sources) == 0:
            self._not_before_s = now_s + settings.refill_retry_s
            return
        self._pool.write_copies(refill.sources, refill.targets)
        self.blocks += len(refill.sources)
        logger.debug(
            "SwiftCache: %d copies made again in this step, %d blocks are short of one",
            len(refill.sources),
            self._replicas.short,
        )
