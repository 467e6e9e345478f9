"""Sends a workload to a server: which turn next, when, and how many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from swiftcache_bench.arrivals import (
    Distribution,
    conversation_arrivals_s,
    gaps_s,
    trace_arrivals_s,
)
from swiftcache_bench.client import Client, request_body
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.ready_queue import ReadyQueue, ReadyQueuePolicy
from swiftcache_bench.records import RequestRecord, record_of
from swiftcache_bench.tokens import TokenIds
from swiftcache_bench.workload.base import Workload

Arrivals = Literal["ready-queue", "conversation", "trace"]
Progress = Callable[[RequestRecord], None]


@dataclass(frozen=True)
class LoadSettings:
    """When turns are sent.

    ``arrivals``: ``ready-queue`` sends the next turn that is ready, one per gap of ``distribution``
    (upstream's way; ``request_rate`` inf is a closed loop of ``max_parallel``); ``conversation``
    gives each conversation arrival times of its own before the run; ``trace`` takes them from the
    data set. In the last two a turn is due at its time, or when the answer before it has come.
    ``round_barrier`` (ready-queue): no turn is sent before all of the round before are answered.
    ``warm_first_round``: first turns go out beforehand, ``max_parallel`` at once, unmeasured.
    """

    arrivals: Arrivals = "ready-queue"
    distribution: Distribution = "poisson"
    request_rate: float = 1.0
    max_parallel: int = 128
    ready_queue_policy: ReadyQueuePolicy = "random"
    round_barrier: bool = False
    warm_first_round: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        if self.max_parallel < 1:
            raise BenchmarkError(f"--max-parallel {self.max_parallel} is not at least 1")
        if not self.request_rate > 0:
            raise BenchmarkError(
                f"--request-rate {self.request_rate:g} is not above 0: inf sends without waiting"
            )
        if self.round_barrier and self.arrivals != "ready-queue":
            raise BenchmarkError("--enable-round-barrier needs --arrivals ready-queue")


@dataclass(frozen=True)
class LoadResult:
    """All requests in the order they ended; how many were never sent, because one before failed."""

    records: list[RequestRecord]
    skipped: int


@dataclass
class _Talk:
    """A conversation under way: what has been said, and which turn is next."""

    number: int
    history: TokenIds = field(default_factory=lambda: np.empty(0, np.uint32))
    turn: int = 0


async def run_load(
    client: Client,
    workload: Workload,
    settings: LoadSettings,
    progress: Progress | None = None,
    before_measured: Callable[[], Awaitable[None]] | None = None,
) -> LoadResult:
    """Send ``workload`` to the end; ``progress`` is called after each request.

    ``before_measured`` is awaited between what goes out beforehand and the measured part.

    A conversation ends with its first request that is not answered whole. Raises BenchmarkError
    when ``settings`` do not suit the workload, before anything is sent.
    """
    if settings.warm_first_round and all(len(c.turns) < 2 for c in workload.conversations):
        raise BenchmarkError(
            f"{workload.name} has one turn a conversation: --warm-first-round leaves nothing to "
            "measure"
        )
    run = _Run(client, workload, settings, progress)
    schedule = _schedule(workload, settings)
    if settings.warm_first_round:
        await run.send_first_round()
    if before_measured is not None:
        await before_measured()
    run.start_clock()
    if schedule is None:
        await run.send_ready()
    else:
        await run.send_scheduled(schedule)
    return LoadResult(run.records, workload.requests - len(run.records))


def _schedule(workload: Workload, settings: LoadSettings) -> list[list[float]] | None:
    """Times of all turns in seconds from the start; None for the ready queue."""
    if settings.arrivals == "ready-queue":
        return None
    if settings.arrivals == "trace":
        times = trace_arrivals_s(workload)
    else:
        times = conversation_arrivals_s(
            workload, settings.distribution, settings.request_rate, settings.seed
        )
    if settings.warm_first_round:
        return [[at - of_turns[0] for at in of_turns] for of_turns in times]
    return times


class _Run:
    def __init__(
        self,
        client: Client,
        workload: Workload,
        settings: LoadSettings,
        progress: Progress | None,
    ) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._workload = workload
        self._settings = settings
        self._progress = progress
        self._slots = asyncio.Semaphore(settings.max_parallel)
        self._talks = [_Talk(number) for number in range(len(workload.conversations))]
        self._start_s = time.perf_counter()

    # -- the three ways to send ---------------------------------------------------------------

    async def send_first_round(self) -> None:
        """First turns, unmeasured."""

        async def first(talk: _Talk) -> None:
            async with self._slots:
                await self._send(talk, measured=False)

        await _all(first(talk) for talk in self._talks)

    def start_clock(self) -> None:
        """From here times are counted."""
        self._start_s = time.perf_counter()

    async def send_scheduled(self, times: Sequence[Sequence[float]]) -> None:
        """Every turn at its time, in seconds from the start, or once its conversation is there."""

        async def converse(talk: _Talk) -> None:
            ready_s = self._start_s
            while not self._ended(talk):
                due_s = max(ready_s, self._start_s + times[talk.number][talk.turn])
                await _wait_until(due_s)
                async with self._slots:
                    await self._send(talk, due_s=due_s)
                ready_s = time.perf_counter()

        await _all(converse(talk) for talk in self._talks)

    async def send_ready(self) -> None:
        """The next ready turn, then a gap, and so on; waits while too many are under way."""
        rng = np.random.default_rng(self._settings.seed)
        gaps = gaps_s(self._settings.distribution, self._settings.request_rate, rng)
        going = [talk for talk in self._talks if not self._ended(talk)]
        queue = ReadyQueue(going, self._settings.ready_queue_policy, rng)
        next_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                talk = await queue.take()
                if talk is None:
                    return
                tasks.create_task(self._send_and_put_back(talk, queue))
                next_s = max(time.perf_counter(), next_s + next(gaps))
                await _wait_until(next_s)

    async def _send_and_put_back(self, talk: _Talk, queue: ReadyQueue[_Talk]) -> None:
        await self._send(talk)
        self._slots.release()
        if self._ended(talk):
            queue.leave()
        elif self._settings.round_barrier:
            queue.hold(talk)
        else:
            queue.put(talk)

    # -- one request --------------------------------------------------------------------------

    def _ended(self, talk: _Talk) -> bool:
        return talk.turn >= len(self._workload.conversations[talk.number].turns)

    async def _send(
        self, talk: _Talk, *, due_s: float | None = None, measured: bool = True
    ) -> None:
        turns = self._workload.conversations[talk.number].turns
        turn = turns[talk.turn]
        prompt = np.concatenate([talk.history, turn.input_ids])
        body = request_body(prompt, turn.output_tokens)
        answer = await self._client.generate(body, len(prompt), turn.output_tokens)
        record = record_of(
            answer,
            prompt,
            conversation=talk.number,
            round_number=talk.turn,
            measured=measured,
            prefix_tokens=len(talk.history) or turn.shared_tokens,
            start_s=self._start_s,
            due_s=answer.sent_s if due_s is None else due_s,
        )
        self.records.append(record)
        talk.history = np.concatenate([prompt, answer.output_ids])
        talk.turn = talk.turn + 1 if record.ok else len(turns)
        if self._progress is not None:
            self._progress(record)


async def _wait_until(at_s: float) -> None:
    """Until ``at_s`` of ``time.perf_counter`` or later; lets others run, however late it is.

    Timers may go off early: uvloop's count whole milliseconds from when the loop last saw a clock.
    """
    await asyncio.sleep(0)
    while (left_s := at_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s)


async def _all(work: Iterable[Coroutine[object, object, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for one in work:
            tasks.create_task(one)
