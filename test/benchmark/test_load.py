"""Sending a workload: the right prompts, in order, so many at once, nothing lost silently."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from benchmark.fake_server import FakeServer, answer_ids
from benchmark.serving import serving
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcache_bench.client import Client, Status
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.load import LoadResult, LoadSettings, run_load
from swiftcache_bench.ready_queue import ReadyQueue, ReadyQueuePolicy
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.base import Conversation, Turn, Workload
from swiftcache_bench.workload.generated import GeneratedShape, generate_conversations

IDS = IdRange(100, 800)
FAST = LoadSettings(request_rate=math.inf)


def workload(conversations: int = 4, rounds: int = 3) -> Workload:
    shape = GeneratedShape(conversations, rounds, rounds, 12, 5, 4)
    return generate_conversations(shape, IDS, 1)


def send(
    server: FakeServer, work: Workload, load: LoadSettings, runner: asyncio.Runner | None = None
) -> LoadResult:
    async def run() -> LoadResult:
        async with serving(server) as url, Client(url, 30.0) as client:
            return await run_load(client, work, load)

    return asyncio.run(run()) if runner is None else runner.run(run())


def by_place(result: LoadResult) -> dict[tuple[int, int], RequestRecord]:
    return {(record.conversation, record.round): record for record in result.records}


def expected_prompts(work: Workload) -> list[list[list[int]]]:
    """Of every conversation the prompts of its turns, with the fake's answers between."""
    prompts = []
    for conversation in work.conversations:
        history: list[int] = []
        of_turns = []
        for turn in conversation.turns:
            history = history + turn.input_ids.tolist()
            of_turns.append(history)
            history = history + answer_ids(history, turn.output_tokens)
        prompts.append(of_turns)
    return prompts


LOADS = [
    FAST,
    LoadSettings(request_rate=math.inf, ready_queue_policy="fifo", max_parallel=1),
    LoadSettings(request_rate=math.inf, round_barrier=True),
    LoadSettings(request_rate=math.inf, warm_first_round=True, max_parallel=2),
    LoadSettings(arrivals="conversation", request_rate=200.0),
    LoadSettings(arrivals="conversation", request_rate=200.0, warm_first_round=True),
]


@pytest.mark.parametrize("load", LOADS)
def test_every_turn_is_sent_once_with_what_was_said_before(load: LoadSettings) -> None:
    server, work = FakeServer(), workload()
    result = send(server, work, load)
    prompts = expected_prompts(work)
    assert result.skipped == 0
    assert all(record.ok for record in result.records)
    sent = sorted(body["input_ids"] for body in server.bodies)
    assert sent == sorted(prompt for of_turns in prompts for prompt in of_turns)
    records = by_place(result)
    assert len(records) == len(result.records) == work.requests
    for (number, turn), record in records.items():
        assert record.prompt_tokens == len(prompts[number][turn])
        history = len(prompts[number][turn]) - len(work.conversations[number].turns[turn].input_ids)
        assert record.prefix_tokens == history
        assert record.output_tokens == 4
        assert record.measured == (not load.warm_first_round or turn > 0)


@pytest.mark.parametrize("load", LOADS)
def test_turns_of_a_conversation_do_not_overlap(load: LoadSettings) -> None:
    records = by_place(send(FakeServer(), workload(), load))
    for (number, turn), record in records.items():
        assert record.ttft_s is not None
        assert record.latency_s is not None
        assert 0 < record.ttft_s <= record.latency_s
        assert record.due_s <= record.sent_s
        before = records.get((number, turn - 1))
        if before is not None and before.measured == record.measured:
            assert before.finished_s is not None
            assert before.finished_s <= record.due_s


class HastyLoop(asyncio.SelectorEventLoop):
    """Its timers go off too early, as uvloop's do by up to a millisecond and more under load."""

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay / 2, callback, *args, context=context)


@pytest.mark.parametrize("load", LOADS)
def test_nothing_is_sent_before_it_is_due_whatever_the_timers_do(load: LoadSettings) -> None:
    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        result = send(FakeServer(), workload(), load, runner)
    assert all(record.due_s <= record.sent_s for record in result.records)


@settings(deadline=None, max_examples=10)
@given(most=st.integers(1, 6), arrivals=st.sampled_from(["ready-queue", "conversation"]))
def test_no_more_requests_at_once_than_allowed(most: int, arrivals: Any) -> None:
    server = FakeServer()
    load = LoadSettings(
        arrivals=arrivals, request_rate=math.inf, max_parallel=most, warm_first_round=True
    )
    send(server, workload(conversations=6, rounds=2), load)
    assert 1 <= server.most_running <= most


def test_the_same_load_is_the_same_to_every_server() -> None:
    load = LoadSettings(request_rate=math.inf, max_parallel=1, seed=5)
    first, second = FakeServer(), FakeServer(incremental=True, tokenizer=False)
    send(first, workload(), load)
    send(second, workload(), load)
    assert first.bodies == second.bodies


def test_the_barrier_holds_a_round_back_until_the_one_before_is_through() -> None:
    load = LoadSettings(request_rate=math.inf, round_barrier=True, max_parallel=3)
    records = send(FakeServer(), workload(conversations=5, rounds=4), load).records
    for number in range(1, 4):
        begins = min(record.sent_s for record in records if record.round == number)
        ends = [record.finished_s for record in records if record.round == number - 1]
        assert all(end is not None and end <= begins for end in ends)


def test_the_barrier_opens_though_conversations_fail() -> None:
    server = FakeServer(fault=lambda number, body: "refuse" if number < 2 else None)
    load = LoadSettings(request_rate=math.inf, round_barrier=True)
    result = send(server, workload(conversations=4, rounds=3), load)
    assert sum(record.ok for record in result.records) == 2 * 3
    assert result.skipped == 2 * 2


@pytest.mark.parametrize("load", LOADS)
def test_a_failed_turn_ends_its_conversation_and_what_is_left_is_counted(
    load: LoadSettings,
) -> None:
    work = workload()
    unlucky = work.conversations[2].turns[0].input_ids.tolist()

    def fault(number: int, body: dict[str, Any]) -> str | None:
        prompt = body["input_ids"]
        return "abort" if prompt[:12] == unlucky and len(prompt) > 12 else None

    result = send(FakeServer(fault=fault), work, load)
    records = by_place(result)
    assert records[2, 1].status is Status.ABORTED
    assert records[2, 1].output_digest is None
    assert (2, 2) not in records
    assert result.skipped == 1
    assert sum(record.ok for record in result.records) == work.requests - 2


def test_a_trace_is_sent_at_its_times_without_waiting_for_answers() -> None:
    times = [0.3, 0.0, 0.1]
    work = Workload(
        "trace",
        tuple(
            Conversation((Turn(np.array([200 + i], np.uint32), 2, arrival_s=at),))
            for i, at in enumerate(times)
        ),
    )
    records = by_place(send(FakeServer(), work, LoadSettings(arrivals="trace")))
    for number, at in enumerate(times):
        assert records[number, 0].due_s == pytest.approx(at)
        assert records[number, 0].sent_s >= at


def test_waiting_for_a_slot_counts_where_the_time_was_given() -> None:
    turns = [Turn(np.array([200 + i], np.uint32), 2, arrival_s=0.0) for i in range(4)]
    work = Workload("trace", tuple(Conversation((turn,)) for turn in turns))
    load = LoadSettings(arrivals="trace", max_parallel=1)
    records = sorted(send(FakeServer(), work, load).records, key=lambda r: r.sent_s)
    assert [record.due_s for record in records] == [pytest.approx(0.0)] * 4
    for before, record in pairwise(records):
        assert record.ttft_s is not None
        assert record.ttft_s > record.sent_s
        assert before.finished_s is not None
        assert record.sent_s >= before.finished_s


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_parallel": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"arrivals": "conversation", "round_barrier": True},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BenchmarkError):
        LoadSettings(**wrong)


def test_a_trace_without_times_is_refused_before_anything_is_sent() -> None:
    server = FakeServer()
    with pytest.raises(BenchmarkError, match="no arrival times"):
        send(server, workload(), LoadSettings(arrivals="trace", warm_first_round=True))
    assert not server.bodies


def test_a_warm_up_that_leaves_nothing_to_measure_is_refused() -> None:
    server = FakeServer()
    with pytest.raises(BenchmarkError, match="nothing to measure"):
        send(server, workload(rounds=1), LoadSettings(warm_first_round=True))
    assert not server.bodies


@given(
    members=st.lists(st.integers(), unique=True, max_size=8),
    policy=st.sampled_from(["random", "fifo"]),
)
def test_a_ready_queue_hands_out_each_member_once(
    members: list[int], policy: ReadyQueuePolicy
) -> None:
    async def run() -> list[int]:
        queue = ReadyQueue(members, policy, np.random.default_rng(1))
        taken = []
        while (member := await queue.take()) is not None:
            taken.append(member)
            queue.leave()
        return taken

    taken = asyncio.run(run())
    assert sorted(taken) == sorted(members)
    if policy == "fifo":
        assert taken == members
