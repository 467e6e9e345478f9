"""What becomes of a tier's counts in `/metrics`, where a CPU server has nothing to count."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prometheus_client
import pytest

from sglang.srt.swiftcache.donation_metrics import COUNTERS, DonationMetrics
from sglang.srt.swiftcache.tier_metrics import METRICS, TierMetrics
from sglang.srt.swiftcache.tier_stats import LOSS_CAUSES, TierStats
from sglang.srt.swiftcache.traffic import Traffic

BLOCK_BYTES = 1000


class TwoDonors:
    """A tier with GPU memory as blocks 0 to 9, and host memory as blocks 10 to 19."""

    def __init__(self) -> None:
        self.reclaim_seconds: deque[float] = deque()

    def donor_of(self, blocks: np.ndarray) -> np.ndarray:
        return blocks // 10

    def donor_names(self) -> dict[int, str]:
        return {0: "gpu", 1: "ram"}

    def link_kinds(self) -> dict[int, str]:
        return {0: "nvlink", 1: "host"}


def donor(name: str, link: str, gb_per_s: float, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "link": link,
        "link_details": {"measured_gb_per_s": gb_per_s, "expected_gb_per_s": 1.0},
        "state": "joined",
        "blocks": {"total": 10, "free": 4, "used": 5, "retiring": 1},
        "extents_total": 4,
        "extent_bytes": 100,
        "bytes": 300,
        **fields,
    }


class Server:
    """A tree as `TierMetrics` sees it."""

    def __init__(self) -> None:
        self.stats = TierStats()
        self.traffic = Traffic(TwoDonors(), BLOCK_BYTES, on_gpu=True)  # type: ignore[arg-type]
        self.tier_pool = SimpleNamespace(tier=TwoDonors(), traffic=self.traffic)
        self.donors = [donor("gpu", "nvlink", 340.0), donor("ram", "host", 51.0)]
        self.window: dict[str, Any] = {}
        self.stalls = 0
        self.metrics = TierMetrics(self, {"zone": "a"}, interval_s=1.0)  # type: ignore[arg-type]

    def update(self) -> None:
        self.metrics.update(
            {
                "donors": self.donors,
                "block_tokens": 16,
                "reclaims": {"in_time": 0, "late": 0, "donors_lost": 0},
                "orphaned_extents": 0,
                "stalls": self.stalls,
                **self.window,
                **self.traffic.as_dict(),
                **self.stats.as_dict(),
            }
        )


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


def value(name: str, **labels: str) -> float:
    found = prometheus_client.REGISTRY.get_sample_value(name, {"zone": "a", **labels})
    assert found is not None, f"{name} {labels} is nowhere"
    return found


def test_bytes_are_counted_by_the_wire_that_they_went_over(server: Server) -> None:
    server.stats.requests = 1
    server.update()
    server.traffic.load_begins(np.array([1, 2, 3, 12]))
    server.traffic.count("store", np.array([15, 16]))
    server.update()
    name = "swiftcache_nvlink_bytes_transferred_total"
    assert value(name, direction="load") == 3 * BLOCK_BYTES
    assert value(name, direction="store") == 0
    name = "swiftcache_pcie_bytes_transferred_total"
    assert value(name, direction="load") == BLOCK_BYTES
    assert value(name, direction="store") == 2 * BLOCK_BYTES
    name = "swiftcache_donor_bytes_transferred_total"
    assert value(name, donor="gpu", direction="load") == 3 * BLOCK_BYTES
    assert value(name, donor="ram", direction="store") == 2 * BLOCK_BYTES
    assert value("swiftcache_donor_hit_tokens_total", donor="gpu") == 3 * 16
    assert value("swiftcache_donor_hit_tokens_total", donor="ram") == 16


def test_moves_are_bytes_and_no_hits(server: Server) -> None:
    before = value("swiftcache_donor_hit_tokens_total", donor="gpu")
    loaded = value("swiftcache_nvlink_bytes_transferred_total", direction="load")
    server.traffic.count("load", np.array([4]))
    server.traffic.count("store", np.array([17]))
    server.update()
    assert value("swiftcache_donor_hit_tokens_total", donor="gpu") == before
    moved = value("swiftcache_nvlink_bytes_transferred_total", direction="load")
    assert moved == loaded + BLOCK_BYTES


def test_bandwidth_is_that_of_the_fastest_nvlink(server: Server) -> None:
    server.update()
    assert value("swiftcache_nvlink_max_bandwidth") == 340e9
    assert value("swiftcache_donor_bandwidth", donor="ram") == 51e9
    assert value("swiftcache_worker_donated_memory_ratio", donor="gpu") == 0.75


def test_a_donor_that_is_gone_is_at_zero_and_keeps_its_counts(server: Server) -> None:
    moved = value("swiftcache_donor_bytes_transferred_total", donor="gpu", direction="load")
    del server.donors[0]
    server.update()
    for state in ("free", "used", "retiring"):
        assert value("swiftcache_blocks", donor="gpu", state=state) == 0
    assert value("swiftcache_nvlink_max_bandwidth") == 0
    assert value("swiftcache_donors", state="joined") == 1
    kept = value("swiftcache_donor_bytes_transferred_total", donor="gpu", direction="load")
    assert kept == moved > 0


def test_a_donor_that_came_back_is_there_once_while_its_former_memory_drains(
    server: Server,
) -> None:
    server.donors.append(donor("ram", "host", 51.0, state="lost"))
    server.update()
    assert value("swiftcache_blocks", donor="ram", state="used") == 10
    assert value("swiftcache_donors", state="lost") == 1


def test_losses_are_told_apart_by_their_cause(server: Server) -> None:
    for count, cause in enumerate(LOSS_CAUSES, start=1):
        server.stats.lost_by_cause[cause] += count
    server.stats.corrupt_blocks += 5
    server.update()
    found = [value("swiftcache_lost_blocks_total", cause=c) for c in (*LOSS_CAUSES, "corrupt")]
    assert found == [1, 2, 5]


def test_window_slots_and_stalls_are_taken_over(server: Server) -> None:
    assert value("swiftcache_window_slots", state="used") == 0
    slots = {"used": 64, "free": 32, "retired": 16, "total": 112}
    server.window = {"layer_stream": {"window_slots": slots}}
    server.stalls = 2
    server.update()
    assert value("swiftcache_window_slots", state="used") == 64
    assert value("swiftcache_window_slots", state="retired") == 16
    assert value("swiftcache_stalls_total") == 2


def test_durations_are_observed_once(server: Server) -> None:
    server.tier_pool.tier.reclaim_seconds.extend([0.5, 2.5])
    server.update()
    server.update()
    assert value("swiftcache_reclaim_seconds_count") == 2
    assert value("swiftcache_reclaim_seconds_sum") == 3.0


def test_what_lending_costs_is_there_at_zero_and_counted() -> None:
    metrics = DonationMetrics("engine", {"zone": "a"}, interval_s=0.0)
    names = [metric.name for metric in COUNTERS.values()]
    assert [value(name) for name in names] == [0.0] * len(names)
    totals = {name: float(count) for count, name in enumerate(COUNTERS, start=1)}
    metrics.step(3, 12, lambda: totals | {"lent_extents": 3})
    metrics.step(3, 12, lambda: totals)
    assert [value(name) for name in names] == list(totals.values())
    assert value("swiftcache_worker_donated_memory_ratio", donor="engine") == 0.25


def test_the_documentation_has_every_metric_with_its_labels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}
    for metric in (*METRICS, *COUNTERS.values()):
        row = rows[metric.name]
        assert metric.kind in row
        for label, values in metric.labels.items():
            assert f"`{label}`" in row
            assert ", ".join(values) in row


def test_a_cpu_server_reads_host_memory_without_pcie() -> None:
    traffic = Traffic(TwoDonors(), BLOCK_BYTES, on_gpu=False)  # type: ignore[arg-type]
    traffic.load_begins(np.array([12, 13]))
    assert traffic.bytes_by_wire["local"]["load"] == 2 * BLOCK_BYTES
    assert traffic.bytes_by_wire["pcie"]["load"] == 0


def test_probes_and_the_warm_up_are_no_requests() -> None:
    stats = TierStats()
    requests = [
        SimpleNamespace(rid=rid, cached_tokens_device=0, cached_tokens_host=0, origin_input_ids=[1])
        for rid in ("HEALTH_CHECK_1", "SWIFTCACHE_WARM_UP_1", "a-user-s")
    ]
    stats.count_requests(requests)
    assert (stats.requests, stats.recomputed_tokens) == (1, 1)
