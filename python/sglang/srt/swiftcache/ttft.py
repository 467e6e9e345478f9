"""``swiftcache_ttft_seconds``: the time to first token as SGLang's HTTP process measures it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache.tier_stats import WARM_UP_RID_PREFIX

if TYPE_CHECKING:
    from prometheus_client import Histogram

NAME = "swiftcache_ttft_seconds"
# To 160 s, since a prompt of 100,000 tokens takes tens of seconds to prefill; 5 is the alarm's.
BUCKETS_S = (
    *(0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)


def register(server_args: Any) -> Histogram:
    """Make the histogram, at zero. Once per process, where SGLang makes its own metrics."""
    from prometheus_client import Histogram

    labels = server_args.extra_metric_labels or {}
    buckets = server_args.bucket_time_to_first_token or BUCKETS_S
    histogram = Histogram(
        NAME,
        "Time to the first token of a response, as seen by the server.",
        labels,
        buckets=buckets,
    )
    return histogram.labels(**labels) if labels else histogram


def mark_warm_up(request: Any, server_is_starting: bool) -> None:
    """Give SGLang's own warm-up request, the one that comes before the server is up, a name."""
    single = isinstance(request.text, str) or (
        isinstance(request.input_ids, list) and isinstance(next(iter(request.input_ids), None), int)
    )
    if server_is_starting and request.rid is None and single:
        request.rid = f"{WARM_UP_RID_PREFIX}{uuid.uuid4().hex}"


def is_warm_up(rid: str) -> bool:
    return rid.startswith(WARM_UP_RID_PREFIX)
