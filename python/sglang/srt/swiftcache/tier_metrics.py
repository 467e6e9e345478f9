"""What a server says of its tier in ``/metrics``, with ``--enable-metrics``.

SGLang runs prometheus_client in its multi-process mode: each process writes its values to files in
``PROMETHEUS_MULTIPROC_DIR``, and the HTTP process adds them up. So metrics made here, in the
scheduler process, appear beside SGLang's. Series cannot be taken back in that mode: those of a
donor that has left stay, at 0 where they are gauges.

Every metric is registered, and every label that is known beforehand set to 0, when the tier is
made: none appears only after its first event. ``swiftcache_ttft_seconds`` is made in ``ttft``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sglang.srt.swiftcache.tier_stats import LOSS_CAUSES
from sglang.srt.swiftcache.traffic import DIRECTIONS, WIRES

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

TIERS = ("device", "donor")
BLOCK_STATES = ("free", "used", "retiring")
SLOT_STATES = ("free", "used", "retired")
DONOR_STATES = ("joined", "draining", "lost")
# Outcomes of reclaims and the keys of the tier's status that count them.
RECLAIM_OUTCOMES = {"in_time": "in_time", "late": "late", "donor_lost": "donors_lost"}
LOST_CAUSES = (*LOSS_CAUSES, "corrupt")

_LOAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_RECLAIM_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)


class Metric(NamedTuple):
    """One name in ``/metrics``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    """By name, the values that are known beforehand: none for ``donor``."""
    buckets: tuple[float, ...] = ()


_DONOR: Mapping[str, tuple[str, ...]] = {"donor": ()}

DONATED_RATIO = Metric(
    "swiftcache_worker_donated_memory_ratio",
    "gauge",
    "Part of what a donor has that is lent to this server; of the server's own KV memory, to all.",
    _DONOR,
)
DONOR_ELASTIC = Metric(
    "swiftcache_donor_elastic",
    "gauge",
    "1 if the donor is a serving engine, which lends of its own KV pool.",
    _DONOR,
)

METRICS = (
    Metric("swiftcache_cache_requests_total", "counter", "Requests that were prefilled."),
    Metric(
        "swiftcache_cache_hits_total",
        "counter",
        "Requests of which at least one token was found in this tier.",
        {"tier": TIERS},
    ),
    Metric(
        "swiftcache_hit_tokens_total",
        "counter",
        "Prompt tokens that were found in this tier.",
        {"tier": TIERS},
    ),
    Metric("swiftcache_recomputed_tokens_total", "counter", "Prompt tokens that were computed."),
    Metric(
        "swiftcache_nvlink_bytes_transferred_total",
        "counter",
        "Bytes between this GPU and donors on NVLink.",
        {"direction": DIRECTIONS},
    ),
    Metric(
        "swiftcache_pcie_bytes_transferred_total",
        "counter",
        "Bytes between this GPU and donors on PCIe, host memory included.",
        {"direction": DIRECTIONS},
    ),
    Metric(
        "swiftcache_donor_bytes_transferred_total",
        "counter",
        "Bytes read from (load) and written to (store) a donor's memory, by any link.",
        {**_DONOR, "direction": DIRECTIONS},
    ),
    Metric(
        "swiftcache_donor_hit_tokens_total",
        "counter",
        "Prompt tokens that were restored from a donor's memory.",
        _DONOR,
    ),
    Metric(
        "swiftcache_nvlink_max_bandwidth",
        "gauge",
        "Bytes per second and direction that the fastest NVLink to a donor reaches, as measured "
        "when it joined; 0 without one.",
    ),
    Metric(
        "swiftcache_donor_bandwidth",
        "gauge",
        "Bytes per second at which a donor's memory is read, as measured when it joined, else as "
        "its link should reach.",
        _DONOR,
    ),
    Metric(
        "swiftcache_load_seconds",
        "histogram",
        "From the first to the last layer of a load from donors.",
        buckets=_LOAD_BUCKETS_S,
    ),
    DONATED_RATIO,
    DONOR_ELASTIC,
    Metric(
        "swiftcache_blocks",
        "gauge",
        "Blocks of donor memory; retiring ones are in use and asked back.",
        {**_DONOR, "state": BLOCK_STATES},
    ),
    Metric("swiftcache_donors", "gauge", "Donors of this server.", {"state": DONOR_STATES}),
    Metric(
        "swiftcache_window_slots",
        "gauge",
        "Tokens' slots in the layer-stream window; 0 without one.",
        {"state": SLOT_STATES},
    ),
    Metric(
        "swiftcache_reclaims_total",
        "counter",
        "Times that a donor asked memory back, by how it ended.",
        {"outcome": tuple(RECLAIM_OUTCOMES)},
    ),
    Metric(
        "swiftcache_reclaim_seconds",
        "histogram",
        "From a donor's request to the last of its extents given back.",
        buckets=_RECLAIM_BUCKETS_S,
    ),
    Metric("swiftcache_moved_blocks_total", "counter", "Blocks moved to another donor."),
    Metric(
        "swiftcache_lost_blocks_total",
        "counter",
        "Blocks whose content was lost: a miss, or for corrupt ones the use of a copy.",
        {"cause": LOST_CAUSES},
    ),
    Metric(
        "swiftcache_expired_tokens_total",
        "counter",
        "Tokens forgotten because nothing used them for --swiftcache-ttl seconds.",
    ),
    Metric(
        "swiftcache_orphaned_extents",
        "gauge",
        "Extents of lost donors that are still mapped, on their way out.",
    ),
    Metric(
        "swiftcache_stalls_total",
        "counter",
        "Times that the watchdog saw work waiting without progress.",
    ),
)


_registered: dict[str, Any] = {}


def register(metric: Metric, extra: Mapping[str, str]) -> Any:
    """Make a metric of this process, or return it: a server that lends and borrows has it once.

    ``extra``: labels that all metrics carry. Labels with known values are there at 0 from now on.
    """
    if metric.name in _registered:
        return _registered[metric.name]
    # only now, not when this module is imported: the variable that makes prometheus_client work
    # across processes must be set before
    from prometheus_client import Counter, Gauge, Histogram

    names = [*extra, *metric.labels]
    series: Any
    if metric.kind == "counter":
        series = Counter(metric.name, metric.help, names)
    elif metric.kind == "gauge":
        series = Gauge(metric.name, metric.help, names, multiprocess_mode="mostrecent")
    else:
        series = Histogram(metric.name, metric.help, names, buckets=metric.buckets)
    if "donor" not in metric.labels:
        for values in _combinations(metric.labels):
            labelled(series, extra, values)
    _registered[metric.name] = series
    return series


def labelled(series: Any, extra: Mapping[str, str], labels: Mapping[str, str]) -> Any:
    """The one series of a metric that has these labels."""
    labels = {**extra, **labels}
    return series.labels(**labels) if labels else series


class TierMetrics:
    """Brings ``/metrics`` up to date with the tier's own counts. Scheduler thread only."""

    def __init__(
        self, cache: DonorRadixCache, extra_labels: Mapping[str, str], interval_s: float
    ) -> None:
        """``extra_labels``: ``--extra-metric-labels``, which all metrics of the server carry."""
        self._cache = cache
        self._extra = dict(extra_labels)
        self._interval_s = interval_s
        self._next_s = 0.0
        self._series = {m.name: register(m, self._extra) for m in METRICS}
        self._counted: dict[tuple[str, ...], float] = {}
        self._before_requests: dict[tuple[str, ...], float] = {}
        self._donors_seen: set[str] = set()

    def step(self) -> None:
        """Call at every scheduler step; does nothing until ``interval_s`` is over."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self.update(self._cache.status())

    def update(self, status: Mapping[str, Any]) -> None:
        """Enter ``status``, that of `DonorRadixCache`, and the durations since the last time."""
        self._update_counts(status)
        self._update_donors(status)
        traffic = self._cache.tier_pool.traffic
        self._drain("swiftcache_load_seconds", traffic.load_seconds)
        self._drain("swiftcache_reclaim_seconds", self._cache.tier_pool.tier.reclaim_seconds)

    def _update_counts(self, status: Mapping[str, Any]) -> None:
        self._count("swiftcache_cache_requests_total", status["requests"])
        for tier in TIERS:
            self._count("swiftcache_cache_hits_total", status["hits"][tier], tier=tier)
            self._count("swiftcache_hit_tokens_total", status["hit_tokens"][tier], tier=tier)
        self._count("swiftcache_recomputed_tokens_total", status["recomputed_tokens"])
        for wire in WIRES:
            name = f"swiftcache_{wire}_bytes_transferred_total"
            for direction, moved in status["bytes_by_wire"][wire].items():
                if name in self._series:
                    self._count_traffic(name, moved, status, direction=direction)
        for outcome, key in RECLAIM_OUTCOMES.items():
            self._count("swiftcache_reclaims_total", status["reclaims"][key], outcome=outcome)
        self._count("swiftcache_moved_blocks_total", status["moved_blocks"])
        lost = {**status["lost_blocks_by_cause"], "corrupt": status["corrupt_blocks"]}
        for cause in LOST_CAUSES:
            self._count("swiftcache_lost_blocks_total", lost[cause], cause=cause)
        self._count("swiftcache_expired_tokens_total", status["expired_tokens"])
        self._count("swiftcache_stalls_total", status["stalls"])
        self._set("swiftcache_orphaned_extents", status["orphaned_extents"])
        slots = status.get("layer_stream", {}).get("window_slots", {})
        for state in SLOT_STATES:
            self._set("swiftcache_window_slots", slots.get(state, 0), state=state)

    def _update_donors(self, status: Mapping[str, Any]) -> None:
        # one that came back while its former memory drains is there twice, under one name
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for donor in status["donors"]:
            by_name.setdefault(donor["name"], []).append(donor)
        fastest = 0.0
        self._donors_seen.update(by_name, status["bytes_by_donor"])
        for name in self._donors_seen:
            donors = by_name.get(name, [])
            for state in BLOCK_STATES:
                blocks = sum(donor["blocks"][state] for donor in donors)
                self._set("swiftcache_blocks", blocks, donor=name, state=state)
            lends = sum(donor["extents_total"] * donor["extent_bytes"] for donor in donors)
            lent = sum(donor["bytes"] for donor in donors)
            ratio = lent / lends if lends else 0.0
            self._set("swiftcache_worker_donated_memory_ratio", ratio, donor=name)
            elastic = any(donor.get("elastic", False) for donor in donors)
            self._set("swiftcache_donor_elastic", elastic, donor=name)
            rate = max((_bytes_per_s(donor) for donor in donors), default=0.0)
            self._set("swiftcache_donor_bandwidth", rate, donor=name)
            if any(donor["link"] == "nvlink" for donor in donors):
                fastest = max(fastest, rate)
            moved = status["bytes_by_donor"].get(name, {})
            for direction in DIRECTIONS:
                self._count_traffic(
                    "swiftcache_donor_bytes_transferred_total",
                    moved.get(direction, 0),
                    status,
                    donor=name,
                    direction=direction,
                )
            hit_tokens = status["hit_blocks_by_donor"].get(name, 0) * status["block_tokens"]
            self._count("swiftcache_donor_hit_tokens_total", hit_tokens, donor=name)
        self._set("swiftcache_nvlink_max_bandwidth", fastest)
        states = [donor["state"] for donor in status["donors"]]
        for state in DONOR_STATES:
            self._set("swiftcache_donors", states.count(state), state=state)

    def _count(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to ``total``, which never falls."""
        key = (name, *labels.values())
        before = self._counted.get(key, 0)
        labelled(self._series[name], self._extra, labels).inc(total - before)
        self._counted[key] = total

    def _count_traffic(
        self, name: str, total: float, status: Mapping[str, Any], **labels: str
    ) -> None:
        """As `_count`, less what came before the first request: the warm-up stores a block."""
        if status["requests"] == 0:
            self._count(name, 0, **labels)
            self._before_requests[(name, *labels.values())] = total
        else:
            before = self._before_requests.get((name, *labels.values()), 0)
            self._count(name, total - before, **labels)

    def _set(self, name: str, value: float, **labels: str) -> None:
        labelled(self._series[name], self._extra, labels).set(value)

    def _drain(self, name: str, durations_s: Any) -> None:
        while durations_s:
            labelled(self._series[name], self._extra, {}).observe(durations_s.popleft())


def _combinations(labels: Mapping[str, tuple[str, ...]]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for name, values in labels.items():
        found = [{**given, name: value} for given in found for value in values]
    return found


def _bytes_per_s(donor: Mapping[str, Any]) -> float:
    details = donor["link_details"]
    gb_per_s: float = details["measured_gb_per_s"] or details["expected_gb_per_s"]
    return gb_per_s * 1e9
