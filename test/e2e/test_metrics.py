"""`/metrics` of a real server: all of it there at zero, and right after known traffic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from e2e.conftest import SMALL_POOL

from sglang.srt.swiftcache import tier_metrics, ttft
from sglang.srt.swiftcache.donation_metrics import COUNTERS
from support.conversations import Turn, donor_tokens, hold
from support.deployed import adapter_expressions, dashboard_expressions, rules
from support.donors import Donor
from support.processes import free_port, wait_until
from support.promql import sample_labels, selectors
from support.server import Server, samples

DEADLINE_S = 120.0
START_DEADLINE_S = 420.0  # on a machine that runs other tests too
SWIFTCACHE = (sys.executable, "-m", "swiftcache_tier")
BLOCK_BYTES = 16384  # of the tiny model, at 16 tokens a page
STORED = 'swiftcache_donor_bytes_transferred_total{direction="store",donor="attic"}'
LOADED = 'swiftcache_donor_bytes_transferred_total{direction="load",donor="attic"}'


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Donor]:
    with Donor(tmp_path_factory.mktemp("tier") / "rt", "attic") as donor:
        yield donor


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, donor: Donor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(
        tiny_model,
        *SMALL_POOL,
        *("--page-size", "16", "--enable-metrics"),
        *("--swiftcache-donors", "--swiftcache-runtime-dir", str(donor.runtime_dir)),
        env={"SWIFTCACHE_METRICS_INTERVAL_S": "0.1", "SWIFTCACHE_LOG_FORMAT": "json"},
        tmp_path=tmp_path_factory.mktemp("server"),
        deadline_s=START_DEADLINE_S,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def fresh(server: Server) -> dict[str, float]:
    """What is scraped before the first request."""
    return ours(server)


@pytest.fixture(scope="module")
def turns(server: Server, fresh: dict[str, float]) -> list[Turn]:
    """The traffic that the counts are compared with."""
    return hold(server)


def ours(server: Server) -> dict[str, float]:
    return {name: value for name, value in server.metrics().items() if "swiftcache_" in name}


def settled(server: Server, requests: int) -> dict[str, float]:
    """The metrics once they count ``requests`` requests, and what was stored behind the last."""

    def counted() -> bool:
        found = ours(server)
        stored = found[STORED] // BLOCK_BYTES
        return (
            found["swiftcache_cache_requests_total"] == requests
            and found["swiftcache_ttft_seconds_count"] == requests
            # the server's own warm-up, which is not counted, stored one
            and stored == server.swiftcache()["bytes"]["stored"] // BLOCK_BYTES - 1
        )

    wait_until(counted, DEADLINE_S, f"{requests} requests are counted")
    return ours(server)


def test_everything_is_there_at_zero_before_the_first_request(fresh: dict[str, float]) -> None:
    for metric in tier_metrics.METRICS:
        name = metric.name + ("_count" if metric.kind == "histogram" else "")
        series = [key for key in fresh if re.fullmatch(rf"{name}(\{{.*\}})?", key)]
        assert series, f"{name} is not in /metrics"
        for label, values in metric.labels.items():
            expected = set(values) or {"attic"}
            found = {m for key in series for m in re.findall(rf'{label}="([^"]*)"', key)}
            assert found == expected, f"{name}: {label} has the values {found}"
        if metric.kind != "gauge":
            assert {fresh[key] for key in series} == {0.0}, f"{name} is not at zero"
    assert fresh[f"{ttft.NAME}_count"] == 0
    assert fresh[f'{ttft.NAME}_bucket{{le="5.0"}}'] == 0


def test_gauges_say_what_the_donor_lends(server: Server, fresh: dict[str, float]) -> None:
    (donor,) = server.swiftcache()["donors"]
    assert donor["blocks"]["total"] > 0
    for state in ("free", "used", "retiring"):
        key = f'swiftcache_blocks{{donor="attic",state="{state}"}}'
        assert fresh[key] == donor["blocks"][state]
    assert fresh['swiftcache_worker_donated_memory_ratio{donor="attic"}'] == 1.0
    assert fresh['swiftcache_donors{state="joined"}'] == 1
    assert fresh['swiftcache_donors{state="lost"}'] == 0
    expected = (
        donor["link_details"]["measured_gb_per_s"] or (donor["link_details"]["expected_gb_per_s"])
    )
    assert fresh['swiftcache_donor_bandwidth{donor="attic"}'] == expected * 1e9
    # nothing of this machine is an NVLink, and the CPU reads host memory without PCIe
    assert fresh["swiftcache_nvlink_max_bandwidth"] == 0


def test_requests_hits_and_tokens_are_those_of_the_traffic(
    server: Server, turns: list[Turn]
) -> None:
    found = settled(server, len(turns))
    device, donor = sum(t.device_tokens for t in turns), donor_tokens(turns)
    assert donor > 0
    assert found['swiftcache_hit_tokens_total{tier="device"}'] == device
    assert found['swiftcache_hit_tokens_total{tier="donor"}'] == donor
    assert found['swiftcache_donor_hit_tokens_total{donor="attic"}'] == donor
    for tier, tokens in (("device", "device_tokens"), ("donor", "donor_tokens")):
        hits = sum(getattr(turn, tokens) > 0 for turn in turns)
        assert found[f'swiftcache_cache_hits_total{{tier="{tier}"}}'] == hits
    prompt = sum(turn.prompt_tokens for turn in turns)
    assert found["swiftcache_recomputed_tokens_total"] == prompt - device - donor


def test_bytes_blocks_and_durations_are_those_of_the_traffic(
    server: Server, turns: list[Turn]
) -> None:
    found = settled(server, len(turns))
    state = server.swiftcache()
    assert state["block_bytes"] == BLOCK_BYTES
    assert found[LOADED] == donor_tokens(turns) // state["block_tokens"] * BLOCK_BYTES
    assert found[LOADED] == state["bytes"]["loaded"]
    assert found[STORED] > 0
    for name in ("nvlink", "pcie"):
        for direction in ("load", "store"):
            key = f'swiftcache_{name}_bytes_transferred_total{{direction="{direction}"}}'
            assert found[key] == 0
    used = found['swiftcache_blocks{donor="attic",state="used"}']
    assert used == state["blocks"]["used"] > 0
    restored = sum(turn.donor_tokens > 0 for turn in turns)
    assert 0 < found["swiftcache_load_seconds_count"] <= restored
    assert found["swiftcache_load_seconds_sum"] > 0
    assert found[f"{ttft.NAME}_sum"] > 0


def test_probes_are_not_counted(server: Server, turns: list[Turn]) -> None:
    before = settled(server, len(turns))
    for _ in range(3):
        assert server.health_generate() == 200
    server.generate(list(range(5, 40)))
    assert settled(server, len(turns) + 1).keys() == before.keys()


@contextmanager
def exporter(runtime_dir: Path) -> Iterator[str]:
    """`swiftcache exporter` as a process; yields its URL."""
    port = free_port()
    command = [*SWIFTCACHE, "exporter", "--port", str(port), "--runtime-dir", str(runtime_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "/metrics, donors of" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}/metrics"
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()


def test_the_exporter_has_the_donors_side(server: Server, donor: Donor, turns: list[Turn]) -> None:
    with exporter(donor.runtime_dir) as url:
        found = samples(requests.get(url, timeout=DEADLINE_S).text)
        assert found["swiftcache_donors_found"] == 1
        assert found['swiftcache_donor_up{donor="attic"}'] == 1
        extents = server.swiftcache()["donors"][0]["extents_total"]
        assert found['swiftcache_donor_extents{donor="attic",state="lent"}'] == extents
        for state in ("free", "orphaned", "degraded"):
            assert found[f'swiftcache_donor_extents{{donor="attic",state="{state}"}}'] == 0
        held = [v for key, v in found.items() if key.startswith("swiftcache_donor_receiver_bytes")]
        assert held == [8 << 20]


def test_rules_and_dashboard_read_metrics_and_labels_that_there_are(
    server: Server, donor: Donor, turns: list[Turn]
) -> None:
    there = sample_labels(server.metrics_text())
    with exporter(donor.runtime_dir) as url:
        there |= sample_labels(requests.get(url, timeout=DEADLINE_S).text)
    # of a server that lends; those of its extents are the exporter's too
    there |= {metric.name: set(metric.labels) for metric in COUNTERS.values()}
    records, alerts = rules()
    recorded = {rule.record for rule in records}
    expressions = [rule.expr for rule in [*records, *alerts]]
    expressions += dashboard_expressions() + adapter_expressions()
    for selector in {s for expression in expressions for s in selectors(expression)}:
        if selector.metric in recorded:
            continue
        assert selector.metric in there, f"{selector.metric} is nowhere"
        missing = selector.labels - there[selector.metric] - {"instance", "namespace", "pod"}
        assert not missing, f"{selector.metric} has no label {missing}"


def test_top_shows_donors_links_and_hits(server: Server, donor: Donor, turns: list[Turn]) -> None:
    command = [*SWIFTCACHE, "top", "--runtime-dir", str(donor.runtime_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0, result.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    state = server.swiftcache()
    blocks = state["donors"][0]["blocks"]
    (donor_row,) = (row for row in rows if row[0] == "attic")
    assert donor_row[1:4] == ["host", "serving", "8 MiB"]
    (link,) = (row for row in rows if row[1:2] == ["attic"])
    assert link[0] == server.url
    assert link[2:6] == ["host", "joined", str(blocks["used"]), str(blocks["total"])]
    assert link[6:8] == ["0.00", "0.00"], "nothing moved while top looked twice"
    assert int(link[8]) >= donor_tokens(turns)
    (hits,) = (row for row in rows if row[0] == server.url and "%" in row[3])
    assert (hits[0], int(hits[1])) == (server.url, state["requests"])
    shares = [float(share.rstrip("%")) for share in hits[3:6]]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert hits[6:] == ["0", "0", "0"]


def test_the_server_logs_events_as_json(server: Server, donor: Donor, turns: list[Turn]) -> None:
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    (joined,) = [line for line in lines if line.get("event") == "donor_joined"]
    assert joined["level"] == "INFO"
    assert joined["logger"] == "swiftcache_tier.receiver.tier"
    assert (joined["donor"], joined["donor_pid"]) == ("attic", donor.process.pid)
    assert joined["extents"] == 32
    assert "donor attic (process" in joined["message"]


def test_a_reclaim_and_a_loss_are_counted(server: Server, donor: Donor, turns: list[Turn]) -> None:
    with Donor(donor.runtime_dir, "second"):
        wait_until(
            lambda: ours(server).get('swiftcache_donors{state="joined"}') == 2,
            DEADLINE_S,
            "the second donor is counted",
        )
        donor.leave()
        wait_until(
            lambda: ours(server)['swiftcache_reclaims_total{outcome="in_time"}'] == 1,
            DEADLINE_S,
            "the reclaim is counted",
        )
        found = ours(server)
        assert found["swiftcache_reclaim_seconds_count"] == 1
        assert found['swiftcache_blocks{donor="attic",state="used"}'] == 0
        assert found['swiftcache_worker_donated_memory_ratio{donor="attic"}'] == 0
        moved = server.swiftcache()["moved_blocks"]
        assert found["swiftcache_moved_blocks_total"] == moved > 0
    wait_until(
        lambda: ours(server)['swiftcache_lost_blocks_total{cause="donor_lost"}'] > 0,
        DEADLINE_S,
        "the blocks of the donor that was killed are counted as lost",
    )
    assert ours(server)['swiftcache_reclaims_total{outcome="donor_lost"}'] == 1
