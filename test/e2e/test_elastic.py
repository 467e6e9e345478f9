"""A server lends its own KV memory while it is idle, and takes it back before it needs it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang.srt.swiftcache import donation_metrics
from support.borrower import Borrower
from support.conversations import hold, outputs
from support.processes import wait_until
from support.server import Server

DEADLINE_S = 60.0
PAGE_BYTES = 16 << 10  # 16 tokens of the tiny model
EXTENT_BYTES = 64 << 10
POOL_TOKENS = 4096
POOL_BYTES = POOL_TOKENS * PAGE_BYTES // 16
OTHER_BLOCK_BYTES = 24 << 10  # of a receiver whose model has other pages

ENVIRONMENT = {
    "SWIFTCACHE_EXTENT_BYTES": "64KiB",
    "SWIFTCACHE_HEARTBEAT_S": "0.1",
    "SWIFTCACHE_LEND_QUIET_S": "0.2",
    # Long against what a busy machine makes of a few short requests.
    "SWIFTCACHE_COLD_AFTER_S": "15",
    "SWIFTCACHE_COLD_SCAN_S": "0.1",
    "SWIFTCACHE_TAKE_BACK_WAIT_S": "30",
    "SWIFTCACHE_RECLAIM_DEADLINE_S": "30",
    # SGLang recounts its pool at every step and stops on a page that is lost or has two owners.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


def start(model: Path, folder: Path, *flags: str, **env: str) -> Server:
    return Server(
        model,
        *("--max-total-tokens", str(POOL_TOKENS), "--random-seed", "1"),
        *("--chunked-prefill-size", "512", "--swiftcache-donate", "auto", *flags),
        tmp_path=folder,
        env=ENVIRONMENT | env,
        deadline_s=600.0,
    )


@pytest.fixture(scope="module")
def lender(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start(tiny_model, tmp_path_factory.mktemp("lender"), "--enable-metrics") as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_cached(request: pytest.FixtureRequest) -> None:
    if "lender" in request.fixturenames:
        server = request.getfixturevalue("lender")
        wait_until(lambda: donation(server)["lent_bytes"] == 0, DEADLINE_S, "nothing is lent")
        server.flush()


def donation(server: Server) -> dict[str, Any]:
    state: dict[str, Any] = server.swiftcache()["donation"]
    return state


def borrow(server: Server, block_bytes: int = OTHER_BLOCK_BYTES, name: str = "b") -> Borrower:
    spec = f"ipc://{server.runtime_dir / donation(server)['name']}"
    return Borrower(spec, server.runtime_dir, block_bytes, name)


def wait_for_bytes(borrower: Borrower, at_least: int) -> None:
    wait_until(
        lambda: borrower.held_bytes >= at_least, DEADLINE_S, f"{at_least} bytes have been lent"
    )


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 500) for _ in range(tokens)]


def ask(server: Server, tokens: list[int]) -> requests.Response:
    """One request, whatever becomes of it."""
    sampling = {"max_new_tokens": 16, "temperature": 0}
    return requests.post(
        server.url + "/generate",
        json={"input_ids": tokens, "sampling_params": sampling},
        timeout=DEADLINE_S,
    )


def test_its_output_is_that_of_stock_whether_it_lends_or_not(
    lender: Server, expected_outputs: list[list[int]]
) -> None:
    assert outputs(hold(lender)) == expected_outputs
    lender.flush()
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, POOL_BYTES // 2)
        borrower.fill()
        assert outputs(hold(lender)) == expected_outputs
        assert outputs(hold(lender, at_once=True)) == expected_outputs
        borrower.check()
    assert "Retract" not in lender.log()


def test_an_idle_server_lends_down_to_its_high_mark(lender: Server) -> None:
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
        wait_until(
            lambda: donation(lender)["lent_bytes"] == borrower.held_bytes,
            DEADLINE_S,
            "all that is lent has arrived",
        )
        state = donation(lender)
        assert state["owned_tokens"] >= 0.3 * POOL_TOKENS
        assert state["receivers"] == ["b"]
        assert state["state"] == "serving"
        name = f'donor="{state["name"]}"'
        wait_until(
            lambda: (
                0.65 <= lender.metrics()[f"swiftcache_worker_donated_memory_ratio{{{name}}}"] < 1
            ),
            DEADLINE_S,
            "/metrics has the part that is lent",
        )
        assert lender.metrics()[f"swiftcache_donor_elastic{{{name}}}"] == 1
        assert {m.name for m in donation_metrics.COUNTERS.values()} <= set(lender.metrics())
    wait_until(lambda: donation(lender)["lent_bytes"] == 0, DEADLINE_S, "all came back")


def test_load_takes_memory_back_before_anything_is_evicted_or_retracted(lender: Server) -> None:
    with borrow(lender) as borrower, ThreadPoolExecutor(1) as sender:
        wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
        filled = borrower.fill()
        kept = prompt(400, seed=1)
        lender.generate(kept, 4)
        before = donation(lender)
        borrower.vacating = False
        # One fits into what is left; beside another one, what is kept would have to go.
        several = [prompt(600, seed) for seed in range(2, 5)]
        answers = sender.submit(lender.generate, several, 24)
        wait_until(
            lambda: donation(lender)["held_prefills"] > before["held_prefills"],
            DEADLINE_S,
            "the others wait for memory",
        )
        borrower.vacating = True
        assert len(answers.result(DEADLINE_S)) == 3
        assert donation(lender)["take_backs"] > before["take_backs"]
        assert 0 < borrower.lost_blocks <= filled
        borrower.check()
        (again,) = lender.generate(kept, 4)
        assert again["meta_info"]["cached_tokens"] >= 384, "what was in use lately is still there"
    assert "Retract" not in lender.log()


def test_a_prompt_that_is_cached_takes_nothing_back(lender: Server) -> None:
    chat = prompt(1000, seed=3)
    lender.generate(chat, 4)
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, int(0.4 * POOL_BYTES))  # too little is left for it, uncached
        borrower.fill()
        before = donation(lender)["take_backs"]
        (turn,) = lender.generate(chat, 4)
        assert turn["meta_info"]["cached_tokens"] >= 976
        assert donation(lender)["take_backs"] == before
        assert borrower.lost_blocks == 0


def test_a_flush_leaves_lent_memory_alone(
    lender: Server, expected_outputs: list[list[int]]
) -> None:
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
        borrower.fill()
        borrower.vacating = False
        lender.generate(prompt(300, seed=9), 4)
        lender.flush()
        owned = donation(lender)["owned_tokens"]
        assert owned < POOL_TOKENS
        # Writes every page that is the server's own.
        lender.generate([prompt(owned // 4, seed) for seed in range(3)], 4)
        borrower.check()
        borrower.vacating = True


def test_a_request_that_needs_what_is_lent_waits_for_it_and_others_follow(lender: Server) -> None:
    with borrow(lender) as borrower, ThreadPoolExecutor(4) as senders:
        wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
        borrower.fill()
        borrower.vacating = False
        large = senders.submit(lender.generate, prompt(3000, seed=1), 16)
        wait_until(
            lambda: donation(lender)["extents"]["reclaiming"] > 0, DEADLINE_S, "it is asked back"
        )
        behind = [senders.submit(lender.generate, prompt(200, seed), 16) for seed in range(10, 12)]
        assert not large.done()
        borrower.check()
        borrower.vacating = True
        answers = [sent.result(DEADLINE_S)[0] for sent in (large, *behind)]
        assert [len(answer["output_ids"]) for answer in answers] == [16, 16, 16]
        assert donation(lender)["aborted_requests"] == 0


def test_limit_and_drain_from_the_command_line(lender: Server) -> None:
    from swiftcache_tier.cli import main

    name, where = donation(lender)["name"], ["--runtime-dir", str(lender.runtime_dir)]
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, POOL_BYTES // 2)
        assert main(["limit", name, "256KiB", *where]) == 0
        wait_until(lambda: borrower.held_bytes == 256 << 10, DEADLINE_S, "the rest comes back")
        assert main(["drain", name, "--wait", "30", *where]) == 0
        wait_until(lambda: donation(lender)["lent_bytes"] == 0, DEADLINE_S, "all comes back")
        assert donation(lender)["state"] == "drained"
        assert main(["limit", name, "none", *where]) == 0
        wait_for_bytes(borrower, POOL_BYTES // 2)


def test_three_receivers_with_pages_of_their_own_share_one_server(
    lender: Server, expected_outputs: list[list[int]]
) -> None:
    sizes = {"a": 12 << 10, "b": 40 << 10, "c": 20 << 10}
    borrowers = {name: borrow(lender, size, name) for name, size in sizes.items()}
    with borrowers["a"] as a, borrowers["b"] as b, borrowers["c"] as c:
        everyone = (a, b, c)

        def shares() -> list[int]:
            return sorted(borrower.held_bytes // EXTENT_BYTES for borrower in everyone)

        wait_until(
            lambda: sum(shares()) >= 40 and shares()[2] - shares()[0] <= 1,
            DEADLINE_S,
            "equal shares of all that can be lent",
        )
        for borrower in everyone:
            assert borrower.fill() > 0
        assert outputs(hold(lender)) == expected_outputs
        for borrower in everyone:
            borrower.check()


def test_after_much_traffic_extents_are_emptied_for_lending(
    lender: Server, expected_outputs: list[list[int]]
) -> None:
    """Hours of chat in short: prefixes all over the pool, most of them cold, some just used."""
    before = donation(lender)
    rng = random.Random(3)
    for seed in range(30):
        lender.generate(prompt(rng.randrange(60, 400), seed), 8)
    kept = prompt(200, seed=29_000)
    lender.generate(kept, 4)
    cached = donation(lender)["cached_tokens"]
    with borrow(lender) as borrower:
        wait_for_bytes(borrower, POOL_BYTES // 2)
        borrower.fill()
        state = donation(lender)
        evicted = state["evicted_tokens"] - before["evicted_tokens"]
        assert state["cached_tokens"] == cached - evicted
        assert state["evicted_share"] == pytest.approx(evicted / cached, abs=1e-5)
        assert state["evicted_share"] < 1, "what was just used is still there"
        assert state["moved_pages"] > before["moved_pages"]
        assert evicted > 0
        assert state["compaction_seconds"] > before["compaction_seconds"]
        # What was moved is found where it went.
        fresh = lender.generate(kept, 8)[0]
        lender.flush()
        assert lender.generate(kept, 8)[0]["output_ids"] == fresh["output_ids"]
        assert outputs(hold(lender)) == expected_outputs
        borrower.check()


def test_a_holder_that_does_not_answer_costs_a_reason_not_a_hang(
    tiny_model: Path, tmp_path: Path
) -> None:
    """And a restarted server finds its name again, and lends anew, orphans or not."""
    with start(
        tiny_model,
        tmp_path,
        SWIFTCACHE_RECLAIM_DEADLINE_S="1",
        SWIFTCACHE_TAKE_BACK_WAIT_S="0.5",
    ) as server:
        with borrow(server) as borrower:
            wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
            borrower.fill()
            borrower.vacating = False
            answer = ask(server, prompt(3000, seed=1))
            assert answer.status_code == 503, answer.text
            assert "is lent and was not given back within 1 s" in answer.text
            state = donation(server)
            assert state["extents"]["degraded"] > 0
            assert state["aborted_requests"] == 1
            # What fits is served meanwhile.
            assert len(server.generate(prompt(300, seed=2), 4)[0]["output_ids"]) == 4
            # Beside what is cached of it, this one needs less than is owned: of that, it is a part.
            chat = prompt(state["owned_tokens"] + 200, seed=3)
            server.generate(chat[:700], 4)
            assert ask(server, chat).status_code == 503
            borrower.check()

            server.stop()  # SIGKILL: what is lent is orphaned, and stays readable
            borrower.check()
            server.start()
            assert "which was killed, that receivers still held" in server.log()
            borrower.vacating = True
            wait_for_bytes(borrower, int(0.65 * POOL_BYTES))
            wait_until(lambda: borrower.used_blocks == 0, DEADLINE_S, "orphans are vacated")
            borrower.fill()
            borrower.check()
        wait_until(lambda: donation(server)["lent_bytes"] == 0, DEADLINE_S, "all came back")
        assert len(server.generate(prompt(3000, seed=1), 4)[0]["output_ids"]) == 4
