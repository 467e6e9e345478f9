"""The client against a fake server: whole answers, and every way in which one can fail."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from benchmark.fake_server import FAULTS, LAST_WORDS, REFUSAL, FakeServer, answer_ids
from benchmark.serving import serving

from support.processes import free_port
from swiftcache_bench.client import Answer, Client, Status, request_body

PROMPT = np.arange(100, 140, dtype=np.uint32)
TOKENS = 8


def ask(server: FakeServer, timeout_s: float = 30.0, times: int = 1) -> list[Answer]:
    async def run() -> list[Answer]:
        async with serving(server) as url, Client(url, timeout_s) as client:
            body = request_body(PROMPT, TOKENS)
            return [await client.generate(body, len(PROMPT), TOKENS) for _ in range(times)]

    return asyncio.run(run())


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("tokenizer", [False, True])
def test_an_answer_is_read_whole(incremental: bool, tokenizer: bool) -> None:
    (answer,) = ask(FakeServer(incremental=incremental, tokenizer=tokenizer))
    assert answer.status is Status.OK, answer.error
    assert answer.output_ids.tolist() == answer_ids(PROMPT.tolist(), TOKENS)
    assert answer.first_token_s is not None
    assert answer.finished_s is not None
    assert answer.sent_s < answer.first_token_s <= answer.finished_s
    assert len(answer.itl_s) == TOKENS - 1
    assert sum(answer.itl_s) == pytest.approx(answer.finished_s - answer.first_token_s)


def test_the_request_is_greedy_streamed_and_of_fixed_length() -> None:
    server = FakeServer()
    ask(server)
    (body,) = server.bodies
    assert body["input_ids"] == PROMPT.tolist()
    assert body["stream"] is True
    assert body["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": TOKENS,
        "ignore_eos": True,
    }


def test_hits_are_reported_by_place() -> None:
    cold, warm = ask(FakeServer(), times=2)
    assert (cold.cached_tokens, cold.device_tokens, cold.host_tokens) == (0, 0, 0)
    assert warm.cached_tokens == len(PROMPT) - 1
    assert warm.device_tokens + warm.host_tokens == warm.cached_tokens
    assert warm.host_tokens > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_an_answer_that_says_so(fault: str) -> None:
    timeout_s = 0.5 if fault == "hang" else 30.0
    (answer,) = ask(FakeServer(fault=lambda number, body: fault), timeout_s)
    expected = {"abort": Status.ABORTED, "hang": Status.TIMED_OUT}.get(fault, Status.FAILED)
    assert answer.status is expected
    assert answer.error
    assert "\n" not in answer.error
    assert len(answer.output_ids) == 0
    said = {"refuse": REFUSAL, "error": LAST_WORDS, "abort": LAST_WORDS, "hang": "0.5 s"}
    assert said.get(fault, "") in answer.error


def test_one_failure_leaves_the_client_usable() -> None:
    server = FakeServer(fault=lambda number, body: "drop" if number == 0 else None)
    assert [answer.status for answer in ask(server, times=2)] == [Status.FAILED, Status.OK]


def test_no_server_is_a_failure_too() -> None:
    async def run() -> Answer:
        async with Client(f"http://127.0.0.1:{free_port()}", 30.0) as client:
            return await client.generate(request_body(PROMPT, TOKENS), len(PROMPT), TOKENS)

    answer = asyncio.run(run())
    assert answer.status is Status.FAILED
    assert answer.error


def test_a_line_beyond_all_bounds_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftcache_bench.client.LINE_BYTES_MAX", 16)
    (answer,) = ask(FakeServer())
    assert answer.status is Status.FAILED
    assert answer.error


def test_long_answers_fit_into_a_line() -> None:
    async def run() -> Answer:
        # 580 KB of ids in one event, beyond what aiohttp by itself takes for a line.
        tokens = 150_000
        server = FakeServer(group=tokens // 2)
        async with serving(server) as url, Client(url, 60.0) as client:
            return await client.generate(request_body(PROMPT, tokens), len(PROMPT), tokens)

    assert asyncio.run(run()).status is Status.OK
