"""Loads on several servers at once: which of them decides how long, and what is counted."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from benchmark.fake_server import FakeServer
from benchmark.serving import serving

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.load import LoadSettings
from swiftcache_bench.scenario.together import Event, Load, Together, run_together
from swiftcache_bench.workload.base import Conversation, Turn, Workload

AT_ONCE = LoadSettings(request_rate=float("inf"), max_parallel=1)
LIMIT_S = 60.0


def workload(conversations: int, turns: int = 1) -> Workload:
    turn = Turn(np.arange(5, dtype=np.uint32), 3)
    return Workload("made up", (Conversation((turn,) * turns),) * conversations)


def together(
    servers: dict[str, FakeServer],
    loads: dict[str, tuple[Workload, LoadSettings]],
    background: dict[str, tuple[Workload, LoadSettings]] | None = None,
    limit_s: float = LIMIT_S,
    **more: Any,
) -> Together:
    async def run() -> Together:
        async with AsyncExitStack() as stack:
            urls = {n: await stack.enter_async_context(serving(s)) for n, s in servers.items()}
            of = {n: Load(urls[n], *load) for n, load in loads.items()}
            beside = {n: Load(urls[n], *load) for n, load in (background or {}).items()}
            return await run_together(of, beside, limit_s, 30.0, **more)

    return asyncio.run(run())


def test_the_background_goes_on_as_long_as_the_loads_and_no_longer() -> None:
    a, b = FakeServer(), FakeServer()
    slow = LoadSettings(arrivals="conversation", request_rate=100.0)
    result = together({"a": a, "b": b}, {"a": (workload(40), slow)}, {"b": (workload(2), AT_ONCE)})
    assert len(result.records["a"]) == 40
    assert len(result.records["b"]) > 2, "it begins again when it is through"
    assert (result.cut, result.left) == (False, 0)
    asked = len(b.bodies)
    assert asked - len(result.records["b"]) <= 1, "what was under way at the end is given up"


def test_what_is_not_through_at_the_limit_is_cut_and_counted() -> None:
    hangs = FakeServer(fault=lambda number, body: "hang" if number >= 3 else None)
    began = time.monotonic()
    result = together({"a": hangs}, {"a": (workload(5), AT_ONCE)}, limit_s=1.0)
    assert time.monotonic() - began < 20
    assert result.cut
    assert len(result.records["a"]) == 3
    assert result.left == 2


def test_measured_parts_start_together_after_what_is_sent_beforehand() -> None:
    a, b = FakeServer(), FakeServer()
    warm = LoadSettings(request_rate=float("inf"), max_parallel=1, warm_first_round=True)
    asked: list[tuple[int, int]] = []
    result = together(
        {"a": a, "b": b, "c": FakeServer()},
        {"a": (workload(3, 2), warm), "b": (workload(1, 2), warm)},
        {"c": (workload(1), AT_ONCE)},
        begun=lambda: asked.append((len(a.bodies), len(b.bodies))),
    )
    assert len(asked) == 1
    assert asked[0][0] >= 3
    for name, conversations in (("a", 3), ("b", 1)):
        measured = [record.measured for record in result.records[name]]
        assert sorted(measured) == [False] * conversations + [True] * conversations


def test_the_background_too_sends_its_first_turns_beforehand() -> None:
    a, b = FakeServer(), FakeServer()
    warm = LoadSettings(request_rate=float("inf"), max_parallel=1, warm_first_round=True)
    slow = LoadSettings(arrivals="conversation", request_rate=50.0)
    asked: list[tuple[int, int]] = []
    result = together(
        {"a": a, "b": b},
        {"a": (workload(20), slow)},
        {"b": (workload(4, 2), warm)},
        begun=lambda: asked.append((len(a.bodies), len(b.bodies))),
    )
    assert asked == [(0, 4)]
    measured = [record.measured for record in result.records["b"]]
    assert measured.count(False) == 4, "not when it begins again"
    assert measured.count(True) >= 4


def test_a_background_that_cannot_be_sent_ends_it_at_once() -> None:
    unfit = (workload(2), LoadSettings(request_rate=1.0, warm_first_round=True))
    slow = LoadSettings(arrivals="conversation", request_rate=0.001)
    with pytest.raises(BenchmarkError, match="leaves nothing to measure"):
        together({"a": FakeServer(), "b": FakeServer()}, {"a": (workload(2), slow)}, {"b": unfit})


def test_an_event_happens_in_the_measured_part() -> None:
    happened: list[float] = []
    slow = LoadSettings(arrivals="conversation", request_rate=20.0)
    event = Event(0.2, lambda: happened.append(time.monotonic()))
    result = together({"a": FakeServer()}, {"a": (workload(40), slow)}, event=event)
    assert len(happened) == 1
    assert result.event_s is not None
    assert 0.2 <= result.event_s <= result.seconds


def test_settings_that_do_not_fit_end_it_at_once() -> None:
    warm = LoadSettings(warm_first_round=True)
    with pytest.raises(BenchmarkError, match="leaves nothing to measure"):
        together(
            {"a": FakeServer(), "b": FakeServer()},
            {"a": (workload(2), warm), "b": (workload(2), AT_ONCE)},
        )
