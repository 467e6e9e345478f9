"""The same tokens, whatever the donors do."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from e2e.conftest import SMALL_POOL

from support.conversations import donor_tokens, hold, outputs
from support.donors import Donor
from support.processes import wait_until
from support.server import Server

DEADLINE_S = 60.0


def donor_names(server: Server) -> set[str]:
    return {donor["name"] for donor in server.swiftcache()["donors"] if donor["state"] == "joined"}


def wait_for_donors(server: Server, *names: str) -> None:
    wait_until(
        lambda: donor_names(server) == set(names) and blocks_settled(server),
        DEADLINE_S,
        f"the server's donors are {names or 'none'}",
    )


def blocks_settled(server: Server) -> bool:
    blocks = server.swiftcache()["blocks"]
    return blocks["retiring"] == 0 and blocks["total"] == blocks["free"] + blocks["used"]


@pytest.fixture(scope="module")
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier") / "rt"


@pytest.fixture(scope="module")
def first(runtime_dir: Path) -> Iterator[Donor]:
    with Donor(runtime_dir, "first") as donor:
        yield donor


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, runtime_dir: Path, first: Donor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server on one donor, page size 16, write-through; tests leave it with that donor."""
    with Server(
        tiny_model,
        *SMALL_POOL,
        *("--page-size", "16", "--chunked-prefill-size", "128"),
        *("--swiftcache-donors", "--swiftcache-runtime-dir", str(runtime_dir)),
        env={"SWIFTCACHE_AUDIT_INTERVAL_S": "0.1"},
        tmp_path=tmp_path_factory.mktemp("server"),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        request.getfixturevalue("server").flush()


def test_restored_prefixes_give_the_same_tokens(
    server: Server, expected_outputs: list[list[int]]
) -> None:
    before = server.swiftcache()
    turns = hold(server)
    assert outputs(turns) == expected_outputs
    assert donor_tokens(turns) > 0
    after = server.swiftcache()
    hits = after["hit_tokens"]["donor"] - before["hit_tokens"]["donor"]
    assert hits == donor_tokens(turns)
    assert after["bytes"]["loaded"] > before["bytes"]["loaded"]
    assert after["bytes"]["stored"] > before["bytes"]["stored"]


def test_batches_of_requests_give_the_same_tokens(
    server: Server, expected_outputs: list[list[int]]
) -> None:
    turns = hold(server, at_once=True)
    assert outputs(turns) == expected_outputs
    assert donor_tokens(turns) > 0


def test_corrupted_donor_memory_would_be_noticed(
    server: Server, first: Donor, expected_outputs: list[list[int]]
) -> None:
    """The control: these tests can tell a wrong restore from a right one."""
    assert outputs(hold(server)) == expected_outputs
    assert first.overwrite_memory() > 0
    assert outputs(hold(server)) != expected_outputs


def test_flush_empties_the_donors_too(server: Server) -> None:
    hold(server)
    assert server.swiftcache()["blocks"]["used"] > 0
    server.flush()
    blocks = server.swiftcache()["blocks"]
    assert blocks["used"] == 0
    assert blocks["free"] == blocks["total"]


def test_donors_come_and_go(
    server: Server, first: Donor, runtime_dir: Path, expected_outputs: list[list[int]]
) -> None:
    wait_for_donors(server, "first")
    with Donor(runtime_dir, "second") as second:
        wait_for_donors(server, "first", "second")
        assert outputs(hold(server)) == expected_outputs

        assert second.leave() == 0
        wait_for_donors(server, "first")
        moved = server.swiftcache()["moved_blocks"]
        assert moved > 0, "the blocks of a donor that leaves move to the one that stays"
        turns = hold(server)
        assert outputs(turns) == expected_outputs
        assert donor_tokens(turns) > 0

    with Donor(runtime_dir, "second") as again:
        wait_for_donors(server, "first", "second")
        server.flush()
        assert outputs(hold(server)) == expected_outputs
        again.kill()
        wait_for_donors(server, "first")
        turns = hold(server)
        assert outputs(turns) == expected_outputs
        assert donor_tokens(turns) > 0


def test_a_paused_engine_gives_memory_back(
    server: Server, runtime_dir: Path, expected_outputs: list[list[int]]
) -> None:
    """Also in the midst of a request, whose tokens are those of one that was never paused."""
    prompt, tokens = [7] * 100, 300
    (undisturbed,) = server.generate(prompt, tokens)
    server.flush()
    wait_for_donors(server, "first")
    with Donor(runtime_dir, "second") as second, ThreadPoolExecutor(1) as asker:
        wait_for_donors(server, "first", "second")
        hold(server)
        before = server.swiftcache()
        answer = asker.submit(server.generate, prompt, tokens)
        wait_until(
            lambda: server.swiftcache()["requests"] > before["requests"],
            DEADLINE_S,
            "the request runs",
        )
        server.pause()
        try:
            assert second.leave() == 0
            wait_for_donors(server, "first")
            assert not answer.done()
        finally:
            server.go_on()
        assert answer.result()[0]["output_ids"] == undisturbed["output_ids"]
    after = server.swiftcache()
    assert after["moved_blocks"] > before["moved_blocks"]
    assert after["reclaims"]["in_time"] == before["reclaims"]["in_time"] + 1
    assert after["audits"]["done"] > before["audits"]["done"]
    assert after["audits"]["found"] == 0
    assert outputs(hold(server)) == expected_outputs


def test_without_any_donor_it_recomputes_and_takes_the_next_that_comes(
    tiny_model: Path, tmp_path: Path, expected_outputs: list[list[int]]
) -> None:
    runtime_dir = tmp_path / "rt"
    with (
        Donor(runtime_dir, "only") as only,
        Server(
            tiny_model,
            *SMALL_POOL,
            *("--page-size", "1", "--disable-overlap-schedule"),
            *("--swiftcache-donors", only.spec, "--swiftcache-runtime-dir", str(runtime_dir)),
            *("--hicache-write-policy", "write_through_selective"),
            tmp_path=tmp_path,
        ) as server,
    ):
        assert outputs(hold(server)) == expected_outputs
        assert donor_tokens(hold(server)) > 0
        only.leave()
        wait_for_donors(server)
        turns = hold(server)
        assert outputs(turns) == expected_outputs
        assert donor_tokens(turns) == 0
        with Donor(runtime_dir, "only"):
            wait_for_donors(server, "only")
            hold(server)
            turns = hold(server)
            assert outputs(turns) == expected_outputs
            assert donor_tokens(turns) > 0


def test_write_back_on_a_tier_that_is_too_small(
    tiny_model: Path, tmp_path: Path, expected_outputs: list[list[int]]
) -> None:
    """Pages of 64, room for half of what is evicted, and a donor of the server's own, which is
    killed once and started again."""
    with Server(
        tiny_model,
        *SMALL_POOL,
        *("--page-size", "64", "--hicache-write-policy", "write_back"),
        *("--swiftcache-donors", "host=512KiB"),
        *("--swiftcache-runtime-dir", str(tmp_path / "rt")),
        env={"SWIFTCACHE_EXTENT_BYTES": "128KiB"},
        tmp_path=tmp_path,
    ) as server:
        turns = hold(server) + hold(server)
        assert outputs(turns) == expected_outputs * 2
        assert donor_tokens(turns) > 0
        state = server.swiftcache()
        assert state["blocks"]["total"] * state["block_bytes"] == 512 << 10
        (donor,) = state["donors"]
        psutil.Process(donor["pid"]).kill()
        wait_until(
            lambda: donor["pid"] not in [d["pid"] for d in server.swiftcache()["donors"]],
            DEADLINE_S,
            "nothing is left of it",
        )
        wait_for_donors(server, donor["name"])
        turns = hold(server) + hold(server)
        assert outputs(turns) == expected_outputs * 2
        assert donor_tokens(turns) > 0
    wait_until(lambda: not list((tmp_path / "rt").iterdir()), DEADLINE_S, "the owned donor ended")
