"""Two servers that both lend and borrow: roles change with load, outputs do not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.test_elastic import DEADLINE_S, ENVIRONMENT, donation

from support.conversations import donor_tokens, hold, outputs
from support.donors import Donor
from support.processes import wait_until
from support.server import Server

POOL_TOKENS = 1024
ENOUGH_BYTES = POOL_TOKENS * 1024 // 3
"""Of KV, so that the conversations of these tests fit into it and the pool together."""


def borrowed_bytes(server: Server) -> int:
    """What the server holds of other engines."""
    donors: list[dict[str, Any]] = server.swiftcache()["donors"]
    return sum(donor["bytes"] for donor in donors if donor["name"].startswith("engine"))


@pytest.mark.timeout(1200)  # three servers start, two of them at once
def test_servers_that_lend_to_each_other_answer_as_stock_does(
    tiny_model: Path, tmp_path: Path, expected_outputs: list[list[int]]
) -> None:
    """What a server reads after its lender took memory back and wrote its own KV there is a miss,
    or was moved: a stale read would change the output."""
    runtime_dir = tmp_path / "rt"
    flags = (
        *("--max-total-tokens", str(POOL_TOKENS), "--random-seed", "1"),
        *("--swiftcache-donate", "auto", "--swiftcache-runtime-dir", str(runtime_dir)),
        *("--swiftcache-low-water", "0.25", "--swiftcache-high-water", "0.35"),
        "--swiftcache-donors",
    )
    first = Server(tiny_model, *flags, tmp_path=tmp_path, env=ENVIRONMENT, deadline_s=600)
    second = Server(tiny_model, *flags, tmp_path=tmp_path, env=ENVIRONMENT, deadline_s=600)
    # With a donor to be found neither starts one of its own, in which everything would fit.
    with Donor(runtime_dir, "seed", size="256KiB", extent_size="64KiB") as seed:
        with ThreadPoolExecutor(2) as pair:
            try:
                list(pair.map(Server.start, (first, second)))
                assert seed.leave() == 0
                for server in (first, second):
                    wait_until(
                        lambda server=server: borrowed_bytes(server) > ENOUGH_BYTES,
                        DEADLINE_S,
                        "each has borrowed from the other",
                    )
                for server in (first, second):
                    before = donation(server)
                    assert outputs(hold(server, at_once=True)) == expected_outputs
                    after = donation(server)
                    assert after["take_backs"] > before["take_backs"], "the loaded one takes back"
                    assert after["cached_tokens"] > before["owned_tokens"], (
                        "its own KV lies in memory that the other had"
                    )
                    wait_until(
                        lambda server=server: borrowed_bytes(server) > ENOUGH_BYTES,
                        DEADLINE_S,
                        "the other lends on, as soon as what it has cached itself is cold",
                    )
                    turns = hold(server)
                    assert outputs(turns) == expected_outputs
                    assert donor_tokens(turns) > 0

                # Of that, the first had used some, and asks for it again.
                assert first.swiftcache()["lost_blocks"] > 0
                both = list(pair.map(lambda server: hold(server), (first, second)))
                assert [outputs(turns) for turns in both] == [expected_outputs] * 2
                both = list(pair.map(lambda s: hold(s, at_once=True), (first, second)))
                assert [outputs(turns) for turns in both] == [expected_outputs] * 2
                for server in (first, second):
                    assert donation(server)["aborted_requests"] == 0
                    assert "Retract" not in server.log()
            finally:
                first.stop()
                second.stop()
