"""Loads on several servers at the same time, for as long as those that count take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from swiftcache_bench.client import Client
from swiftcache_bench.load import LoadSettings, run_load
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.workload.base import Workload


class Load(NamedTuple):
    """What one server is sent, and how."""

    url: str
    workload: Workload
    settings: LoadSettings


class Event(NamedTuple):
    """Something that happens `after_s` the measured part of every load has begun."""

    after_s: float
    happen: Callable[[], None]


@dataclass
class Together:
    """What came of it: records by server, those of background loads too.

    `cut`: the limit came before the loads were through, and `left` requests of theirs had not been
    answered. `seconds`: how long the measured part was. `event_s`: when in it the event happened.
    """

    records: dict[str, list[RequestRecord]]
    seconds: float = 0.0
    cut: bool = False
    left: int = 0
    event_s: float | None = None


async def run_together(
    loads: Mapping[str, Load],
    background: Mapping[str, Load],
    limit_s: float,
    request_timeout_s: float,
    event: Event | None = None,
    begun: Callable[[], None] = lambda: None,
) -> Together:
    """Send `loads` to their ends, at most for `limit_s` in all, and `background` for as long.

    First turns that are sent beforehand (`warm_first_round`), those of the background too, go out
    first; when all of them are through `begun` is called, and the measured part starts for all at
    once. What is under way at the limit is given up. Raises BenchmarkError for unfit settings.
    """
    result = Together({name: [] for name in (*loads, *background)})
    warm = sum(load.settings.warm_first_round for load in background.values())
    gate = _Gate(len(loads) + warm, begun)
    async with AsyncExitStack() as clients:
        of = {
            name: await clients.enter_async_context(Client(load.url, request_timeout_s))
            for name, load in {**loads, **background}.items()
        }

        async def send(name: str, load: Load) -> None:
            take = result.records[name].append
            await run_load(of[name], load.workload, load.settings, take, gate.pass_through)

        async def send_again_and_again(name: str, load: Load) -> None:
            take = result.records[name].append
            if load.settings.warm_first_round:
                await run_load(of[name], load.workload, load.settings, take, gate.pass_through)
            await gate.opened.wait()
            for seed in count(load.settings.seed):
                settings = replace(load.settings, seed=seed, warm_first_round=False)
                await run_load(of[name], load.workload, settings, take)

        async def watch_clock() -> None:
            await gate.opened.wait()
            start_s = time.perf_counter()
            try:
                if event is not None:
                    await asyncio.sleep(event.after_s)
                    await asyncio.to_thread(event.happen)
                    result.event_s = time.perf_counter() - start_s
                await asyncio.Event().wait()
            finally:
                result.seconds = time.perf_counter() - start_s

        mine = [asyncio.create_task(send(name, load)) for name, load in loads.items()]
        others = [asyncio.create_task(watch_clock())]
        others += [
            asyncio.create_task(send_again_and_again(name, load))
            for name, load in background.items()
        ]
        done, late = await asyncio.wait(mine, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        await _cancel([*late, *others])
        await asyncio.gather(*done)
    result.cut = bool(late)
    result.left = sum(
        load.workload.requests - len(result.records[name]) for name, load in loads.items()
    )
    return result


class _Gate:
    """Opens once all loads have sent what they send beforehand, and `begun` has returned."""

    def __init__(self, loads: int, begun: Callable[[], None]) -> None:
        self.opened = asyncio.Event()
        self._expected = loads
        self._begun = begun

    async def pass_through(self) -> None:
        self._expected -= 1
        if not self._expected:
            await asyncio.to_thread(self._begun)
            self.opened.set()
        await self.opened.wait()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """End them all; an error in any is raised."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
