"""Checks all books of a running server now and then, and says what does not add up.

What it finds is a defect: a block, a slot or a lock that nobody can be named for will be missing
for good. Nothing is repaired; the log line and ``/server_info`` are for whoever reports it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache.state_dump import StateDump, Violation, summary

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

logger = logging.getLogger(__name__)


class Audit:
    """Of one scheduler. Scheduler thread only, between two steps."""

    def __init__(self, scheduler: Any, cache: DonorRadixCache, interval_s: float) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._interval_s = interval_s
        self._next_s = time.monotonic() + interval_s
        self._last: list[Violation] = []
        self.audits = 0
        self.found = 0
        """Audits that found something."""

    def step(self) -> None:
        """Audit when it is time: costs in proportion to nodes and blocks, tens of milliseconds."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self.audits += 1
        self._last = StateDump(self._scheduler, self._cache).violations()
        if self._last:
            self.found += 1
            logger.error("SwiftCache audit: invariants that do not hold: %s", summary(self._last))

    def as_dict(self) -> dict[str, Any]:
        """For ``/server_info``; ``violated`` is what the last audit found."""
        return {"done": self.audits, "found": self.found, "violated": summary(self._last)}
