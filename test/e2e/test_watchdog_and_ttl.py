"""A server that stands still says why; one with a TTL forgets; a flush reaches the donors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.conftest import SMALL_POOL

from support.conversations import donor_tokens, hold
from support.donors import Donor
from support.processes import wait_until
from support.server import Server, ServerFailed

PLUGIN = Path(__file__).parent / "faulty_plugin"
DEADLINE_S = 120.0
START_DEADLINE_S = 420.0  # on a machine that runs other tests too
TTL_S = 15.0
STALL_S = 4.0


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Tests run in the order of the file; the last one leaves a server that cannot go on."""
    runtime_dir = tmp_path_factory.mktemp("tier") / "rt"
    python_path = os.pathsep.join([str(PLUGIN), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        Donor(runtime_dir, "attic"),
        Server(
            tiny_model,
            *SMALL_POOL,
            *("--page-size", "16", "--swiftcache-ttl", str(TTL_S), "--enable-metrics"),
            *("--swiftcache-donors", "--swiftcache-runtime-dir", str(runtime_dir)),
            env={
                "PYTHONPATH": python_path,
                "FAULTY_DIR": str(faults),
                "SWIFTCACHE_WATCHDOG_S": str(STALL_S),
                "SWIFTCACHE_METRICS_INTERVAL_S": "0.1",
            },
            tmp_path=tmp_path_factory.mktemp("server"),
            deadline_s=START_DEADLINE_S,
        ) as running,
    ):
        yield running


def dumps(server: Server) -> list[dict[str, Any]]:
    """The states that the watchdog has logged, oldest first."""
    lines = re.findall(r"SwiftCache watchdog: no progress.*?; state: (\{.*\})$", server.log(), re.M)
    return [json.loads(line) for line in lines]


def test_idle_conversations_are_forgotten_on_device_and_donors(server: Server) -> None:
    turns = hold(server)
    assert donor_tokens(turns) > 0, "within the TTL, conversations are restored"
    assert server.swiftcache()["blocks"]["used"] > 0
    wait_until(
        lambda: server.swiftcache()["blocks"]["used"] == 0, DEADLINE_S, "all blocks have expired"
    )
    state = server.swiftcache()
    assert state["expired_tokens"] > 0
    assert state["blocks"]["free"] == state["blocks"]["total"]
    assert state["lost_blocks"] == 0
    wait_until(
        lambda: server.metrics()["swiftcache_expired_tokens_total"] == state["expired_tokens"],
        DEADLINE_S,
        "/metrics has the expired tokens",
    )
    again = hold(server)
    assert [t.output_ids for t in again] == [t.output_ids for t in turns]
    first = again[0]
    assert first.device_tokens == first.donor_tokens == 0, "nothing was left to hit"


def test_a_flush_reaches_the_donors(server: Server) -> None:
    turns = hold(server)
    assert server.swiftcache()["blocks"]["used"] > 0
    server.flush()
    blocks = server.swiftcache()["blocks"]
    assert blocks["used"] == blocks["retiring"] == 0
    again = hold(server)
    assert (again[0].device_tokens, again[0].donor_tokens) == (0, 0)
    assert [t.output_ids for t in again] == [t.output_ids for t in turns]


def test_a_stuck_forward_is_reported_with_its_stack(server: Server, faults: Path) -> None:
    before = len(dumps(server))
    (faults / "stuck").touch()
    with ThreadPoolExecutor(1) as asker:
        answer = asker.submit(server.generate, list(range(10, 60)))
        try:
            wait_until(lambda: len(dumps(server)) > before, DEADLINE_S, "the watchdog reports")
        finally:
            (faults / "stuck").unlink()
        assert len(answer.result()[0]["output_ids"]) == 16, "the server goes on"
    state = dumps(server)[before]
    assert {"requests", "scheduler"} & set(state["stalled"])
    assert any("_stuck" in frame for frame in state["scheduler_stack"])
    assert state["violated"] == []
    assert state["leases"]["donors"][0]["name"] == "attic"
    assert server.swiftcache()["stalls"] > 0
    wait_until(
        lambda: server.metrics()["swiftcache_stalls_total"] > 0, DEADLINE_S, "the stall is counted"
    )


def test_leaked_locks_are_named(server: Server, faults: Path) -> None:
    """Every request leaves its prefix locked, until none can be admitted."""
    before = len(dumps(server))
    (faults / "leak").touch()

    def fill() -> None:
        for kind in range(20):  # 512 slots, and ten pages a request
            server.generate([100 + kind] * 150, 4, timeout_s=3 * STALL_S)

    with pytest.raises(ServerFailed, match="no answer"):
        fill()
    wait_until(lambda: len(dumps(server)) > before, DEADLINE_S, "the watchdog reports")
    state = dumps(server)[before]
    assert state["stalled"] == ["requests"]
    assert state["scheduler_stack"] is None, "the scheduler itself goes round, and read its state"
    assert state["queues"]["waiting"] == 1
    assert state["queues"]["running"] == 0
    assert [v["invariant"] for v in state["violated"]] == [
        "every lock has a holder: a request, a store or a load"
    ]
    leaked = [n for n in state["pins"]["first_pinned"] if n["locks"] > n["locks_explained"] == 0]
    assert leaked
    slots = state["device_slots"]
    assert slots["free"] + slots["evictable"] < 150 <= slots["protected"]
