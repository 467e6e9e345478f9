"""``swiftcache_ttft_seconds``: the time to first token as SGLang's HTTP process measures it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache import donate_checks
from sglang.srt.swiftcache.tier_stats import WARM_UP_RID_PREFIX

if TYPE_CHECKING:
    from prometheus_client import Histogram

NAME = "swiftcache_ttft_seconds"
# To 160 s, since a prompt of 100,000 tokens takes tens of seconds to prefill; 5 is the alarm's.
BUCKETS_S = (
    *(0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)


def register(_: Any, manager: Any) -> None:
    """TokenizerManager.init_metric_collector_watchdog: the histogram, at zero."""
    if _is_measured(manager):
        manager.swiftcache_ttft = _histogram(manager.server_args)


def mark_warm_up(manager: Any, obj: Any, request: Any = None) -> None:
    """TokenizerManager.generate_request: SGLang's own warm-up, before it is up, gets a name."""
    # only SGLang's server warms up by HTTP: an Engine, which stays "starting", passes no request
    if request is None or not _has_swiftcache(manager.server_args):
        return
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    single = isinstance(obj.text, str) or (
        isinstance(obj.input_ids, list) and isinstance(next(iter(obj.input_ids), None), int)
    )
    if manager.server_status == ServerStatus.Starting and obj.rid is None and single:
        obj.rid = f"{WARM_UP_RID_PREFIX}{uuid.uuid4().hex}"


def observe(original: Callable[..., None], manager: Any, state: Any, recv_obj: Any, i: int) -> None:
    """TokenizerManager.collect_metrics: it sees the first token."""
    seen = state.ttft_observed
    original(manager, state, recv_obj, i)
    if seen or not state.ttft_observed or not _is_measured(manager):
        return
    if not recv_obj.rids[i].startswith(WARM_UP_RID_PREFIX):
        manager.swiftcache_ttft.observe(state.time_stats.get_first_token_latency())


def _is_measured(manager: Any) -> bool:
    return manager.enable_metrics and _has_swiftcache(manager.server_args)


def _has_swiftcache(server_args: Any) -> bool:
    return server_args.swiftcache_donors is not None or donate_checks.is_on(server_args)


def _histogram(server_args: Any) -> Histogram:
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
