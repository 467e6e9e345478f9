"""What a server that lends its own KV memory says of that in ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.swiftcache.tier_metrics import (
    DONATED_RATIO,
    DONOR_ELASTIC,
    Metric,
    labelled,
    register,
)

COUNTERS = {
    "take_backs": Metric(
        "swiftcache_take_backs_total", "counter", "Times that this engine asked lent memory back."
    ),
    "take_back_seconds": Metric(
        "swiftcache_take_back_seconds_total",
        "counter",
        "Seconds from asking lent memory back to having all that was to come.",
    ),
    "held_prefills": Metric(
        "swiftcache_held_prefills_total",
        "counter",
        "Scheduler steps in which a request waited for memory on its way back.",
    ),
    "held_decodes": Metric(
        "swiftcache_held_decodes_total",
        "counter",
        "Scheduler steps in which decoding waited for memory on its way back.",
    ),
    "aborted_requests": Metric(
        "swiftcache_donation_aborted_requests_total",
        "counter",
        "Requests that could not be served without memory that did not come back.",
    ),
    "evicted_tokens": Metric(
        "swiftcache_donation_evicted_tokens_total",
        "counter",
        "Tokens of cold prefixes that were evicted so that their memory could be lent.",
    ),
    "moved_pages": Metric(
        "swiftcache_donation_moved_pages_total",
        "counter",
        "Pages of cached prefixes that were moved so that an extent could be lent.",
    ),
}
"""By the name under which ``/server_info`` has the same number."""


class DonationMetrics:
    """Brings ``/metrics`` up to date with a `Donation`. Scheduler thread only."""

    def __init__(self, donor: str, extra_labels: Mapping[str, str], interval_s: float) -> None:
        """Registers everything, at 0. ``donor``: the name under which receivers find this one."""
        self._interval_s = interval_s
        self._next_s = 0.0
        self._totals = dict.fromkeys(COUNTERS, 0.0)
        own = {"donor": donor}
        self._ratio = labelled(register(DONATED_RATIO, extra_labels), extra_labels, own)
        labelled(register(DONOR_ELASTIC, extra_labels), extra_labels, own).set(1)
        self._counters: dict[str, Any] = {
            name: labelled(register(metric, extra_labels), extra_labels, {})
            for name, metric in COUNTERS.items()
        }

    def step(
        self, lent_extents: int, extents: int, count: Callable[[], Mapping[str, float]]
    ) -> None:
        """Call at every scheduler step, with how things stand.

        ``count``: gives totals that never fall; asked only when it is time.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        totals = count()
        self._ratio.set(lent_extents / extents)
        for name, counter in self._counters.items():
            counter.inc(totals[name] - self._totals[name])
            self._totals[name] = totals[name]
