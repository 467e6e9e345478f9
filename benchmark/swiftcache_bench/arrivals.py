"""When requests come: gaps between them, and times of each turn drawn before a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.workload.base import Workload

Distribution = Literal["poisson", "uniform"]


def gaps_s(distribution: Distribution, rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless gaps in seconds between arrivals, 1 / ``rate`` on average; all 0 for rate inf.

    ``poisson``: exponential, so that arrivals are a Poisson process. ``uniform``: evenly from 0 to
    twice the average. Raises BenchmarkError for a rate that is not above 0.
    """
    if not rate > 0:
        raise BenchmarkError(f"request rate {rate:g} is not above 0: inf sends without waiting")
    mean = 0.0 if math.isinf(rate) else 1 / rate
    while True:
        yield rng.exponential(mean) if distribution == "poisson" else rng.uniform(0, 2 * mean)


def conversation_arrivals_s(
    workload: Workload, distribution: Distribution, rate: float, seed: int
) -> list[list[float]]:
    """For each conversation the times of its turns, in seconds from the start, ascending.

    Each conversation has a process of its own with its share of ``rate``, requests per second, so
    that together they are a process of that rate. Fixed by the seed: no server changes them.
    """
    share = rate / max(1, len(workload.conversations))
    times = []
    for number, conversation in enumerate(workload.conversations):
        gaps = gaps_s(distribution, share, np.random.default_rng([seed, number]))
        now = 0.0
        of_turns = []
        for _ in conversation.turns:
            now += next(gaps)
            of_turns.append(now)
        times.append(of_turns)
    return times


def trace_arrivals_s(workload: Workload) -> list[list[float]]:
    """The times that the data set gives. Raises BenchmarkError when it gives none."""
    times = [
        [turn.arrival_s for turn in conversation.turns if turn.arrival_s is not None]
        for conversation in workload.conversations
    ]
    if not workload.has_arrivals:
        raise BenchmarkError(
            f"{workload.name} has no arrival times: use --arrivals ready-queue or conversation"
        )
    return times
