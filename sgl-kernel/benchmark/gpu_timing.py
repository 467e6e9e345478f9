"""How long a call keeps the GPU, and how long it keeps the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

Call = Callable[[], object]

# Each figure is the median of so many, as far as the time allows.
REPEATS_MIN, REPEATS_MAX = 3, 15
TIME_PER_FIGURE_MS = 20.0
# At most what a GPU's clock makes; a slower one only sleeps longer.
CYCLES_PER_US = 2000
SLEEP_MARGIN_US = 30.0


class Timing(NamedTuple):
    gpu_us: float
    host_us: float


class Beside(NamedTuple):
    """A call and a product that start together, each on its own stream."""

    call_us: float
    product_us: float


def host_us(call: Call) -> float:
    """What the host spends in a call; the better of two, as the first one may have to wait."""
    times = []
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    torch.cuda.synchronize()
    return min(times)


def time_alone(call: Call) -> Timing:
    """On the current stream. The GPU begins when the host is done, so it never waits for it."""
    call()
    host = host_us(call)

    def once() -> float:
        start, end = _event(), _event()
        _sleep(host)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    return Timing(_median(once, host), host)


def time_beside(call: Call, product: Call) -> Beside:
    """`call` on a stream of its own, `product` on the current one."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
        host = host_us(call)
    calls: list[float] = []

    def once() -> float:
        start, call_end, product_end = _event(), _event(), _event()
        _sleep(host)
        start.record()
        side.wait_event(start)
        with torch.cuda.stream(side):
            call()
            call_end.record()
        product()
        product_end.record()
        torch.cuda.synchronize()
        calls.append(start.elapsed_time(call_end) * 1e3)
        return start.elapsed_time(product_end) * 1e3

    product_us = _median(once, host)
    return Beside(median(calls), product_us)


def _median(once: Callable[[], float], host: float) -> float:
    times = [once()]
    each_ms = (times[0] + host * 2) / 1e3
    repeats = min(max(int(TIME_PER_FIGURE_MS / each_ms), REPEATS_MIN), REPEATS_MAX)
    times += [once() for _ in range(repeats - 1)]
    return median(times)


def _sleep(host: float) -> None:
    torch.cuda._sleep(int((host * 1.5 + SLEEP_MARGIN_US) * CYCLES_PER_US))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
