"""What a server that lends its own KV memory says of that in ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sglang.srt.swiftcache.tier_metrics import (
    DONATED_RATIO,
    DONOR_ELASTIC,
    Metric,
    labelled,
    register,
)

_TAKE_BACKS = Metric(
    "swiftcache_take_backs_total", "counter", "Times that this engine asked lent memory back."
)
_ABORTED = Metric(
    "swiftcache_donation_aborted_requests_total",
    "counter",
    "Requests that could not be served without memory that did not come back.",
)


class DonationMetrics:
    """Brings ``/metrics`` up to date with a `Donation`. Scheduler thread only."""

    def __init__(self, donor: str, extra_labels: Mapping[str, str], interval_s: float) -> None:
        """Registers everything, at 0. ``donor``: the name under which receivers find this one."""
        self._interval_s = interval_s
        self._next_s = 0.0
        self._totals = {_TAKE_BACKS.name: 0, _ABORTED.name: 0}
        own = {"donor": donor}
        self._ratio = labelled(register(DONATED_RATIO, extra_labels), extra_labels, own)
        labelled(register(DONOR_ELASTIC, extra_labels), extra_labels, own).set(1)
        self._counters: dict[str, Any] = {
            metric.name: labelled(register(metric, extra_labels), extra_labels, {})
            for metric in (_TAKE_BACKS, _ABORTED)
        }

    def step(self, lent_extents: int, extents: int, take_backs: int, aborted: int) -> None:
        """Call at every scheduler step, with how things stand and totals that never fall."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        self._ratio.set(lent_extents / extents)
        for name, total in ((_TAKE_BACKS.name, take_backs), (_ABORTED.name, aborted)):
            self._counters[name].inc(total - self._totals[name])
            self._totals[name] = total
