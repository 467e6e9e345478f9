"""A byte that changes in a donor's memory costs a recomputation, never a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.conftest import SMALL_POOL

from stress.__main__ import main as stress
from support.conversations import donor_tokens, hold, outputs
from support.donors import Donor
from support.server import Server


@pytest.fixture(scope="module")
def donor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Donor]:
    with Donor(tmp_path_factory.mktemp("tier") / "rt", "first") as donor:
        yield donor


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, donor: Donor, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(
        tiny_model,
        *SMALL_POOL,
        *("--page-size", "16", "--chunked-prefill-size", "128", "--swiftcache-verify"),
        *("--swiftcache-donors", "--swiftcache-runtime-dir", str(donor.runtime_dir)),
        tmp_path=tmp_path_factory.mktemp("server"),
    ) as running:
        yield running


def test_overwritten_donor_memory_is_recomputed(
    server: Server, donor: Donor, expected_outputs: list[list[int]]
) -> None:
    assert server.server_info()["swiftcache_verify"] is True
    turns = hold(server)
    assert outputs(turns) == expected_outputs
    assert donor_tokens(turns) > 0
    assert server.swiftcache()["corrupt_blocks"] == 0

    assert donor.overwrite_memory() > 0
    assert outputs(hold(server)) == expected_outputs
    found = server.swiftcache()["corrupt_blocks"]
    assert found > 0
    assert "of donor first" in server.log()

    # What was dropped was stored anew, and is restored again.
    turns = hold(server)
    assert outputs(turns) == expected_outputs
    assert donor_tokens(turns) > 0


def test_bits_that_flip_while_requests_run_and_are_aborted(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, "--seconds", "10", "--flips-per-s", "100", "--round-s", "4"]
    assert stress(flags) == 0, capsys.readouterr().out
