"""Arrival processes: of the rate asked for, fixed by the seed, refused when they make no sense."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_bench.arrivals import (
    Distribution,
    conversation_arrivals_s,
    gaps_s,
    trace_arrivals_s,
)
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.generated import GeneratedShape, generate_conversations

IDS = IdRange(10, 100)
DISTRIBUTIONS: list[Distribution] = ["poisson", "uniform"]


def some(distribution: Distribution, rate: float, seed: int, count: int) -> list[float]:
    return list(itertools.islice(gaps_s(distribution, rate, np.random.default_rng(seed)), count))


@given(
    distribution=st.sampled_from(DISTRIBUTIONS),
    rate=st.floats(0.01, 1000),
    seed=st.integers(0, 2**32),
)
def test_gaps_are_fixed_by_the_seed_and_never_negative(
    distribution: Distribution, rate: float, seed: int
) -> None:
    gaps = some(distribution, rate, seed, 50)
    assert gaps == some(distribution, rate, seed, 50)
    assert gaps != some(distribution, rate, seed + 1, 50)
    assert min(gaps) >= 0
    if distribution == "uniform":
        assert max(gaps) <= 2 / rate


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_gaps_have_the_mean_of_the_rate(distribution: Distribution) -> None:
    gaps = some(distribution, 4.0, 1, 20_000)
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.array(some("poisson", 1.0, 1, 20_000))
    # An exponential's standard deviation is its mean, and a part 1/e of it lies above that.
    assert gaps.std() == pytest.approx(1.0, rel=0.05)
    assert (gaps > 1).mean() == pytest.approx(math.exp(-1), rel=0.05)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_an_infinite_rate_has_no_gaps(distribution: Distribution) -> None:
    assert some(distribution, math.inf, 1, 5) == [0.0] * 5


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_not_above_zero_is_refused(rate: float) -> None:
    with pytest.raises(BenchmarkError, match="not above 0"):
        some("poisson", rate, 1, 1)


@given(conversations=st.integers(1, 6), rounds=st.integers(1, 5), seed=st.integers(0, 999))
def test_a_conversations_turns_come_one_after_the_other(
    conversations: int, rounds: int, seed: int
) -> None:
    workload = generate_conversations(
        GeneratedShape(conversations, rounds, rounds, 2, 2, 1), IDS, seed
    )
    times = conversation_arrivals_s(workload, "poisson", 2.0, seed)
    assert times == conversation_arrivals_s(workload, "poisson", 2.0, seed)
    assert [len(of_turns) for of_turns in times] == [rounds] * conversations
    for of_turns in times:
        assert of_turns == sorted(of_turns)
        assert of_turns[0] >= 0


def test_conversations_together_come_at_the_rate() -> None:
    workload = generate_conversations(GeneratedShape(200, 50, 50, 1, 1, 1), IDS, 1)
    times = conversation_arrivals_s(workload, "poisson", 10.0, 1)
    # While all of them are still going on, so in the first half of the time they take.
    within = sum(at < 500 for of_turns in times for at in of_turns)
    assert within == pytest.approx(500 * 10, rel=0.05)


def test_a_workload_without_times_has_no_trace() -> None:
    workload = generate_conversations(GeneratedShape(1, 1, 1), IDS, 1)
    with pytest.raises(BenchmarkError, match="no arrival times"):
        trace_arrivals_s(workload)
