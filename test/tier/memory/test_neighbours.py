"""Extents that one call serves together, and those that are chosen to be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.extents.neighbours import runs_of, side_by_side


@given(st.sets(st.integers(0, 40)), st.one_of(st.none(), st.integers(1, 5)))
def test_every_slot_is_in_one_run_and_no_run_could_go_on(slots: set[int], most: int | None) -> None:
    runs = list(runs_of(slots, most))
    assert [slot for run in runs for slot in run] == sorted(slots)
    assert all(0 < len(run) <= (most or len(slots)) for run in runs)
    for run, after in pairwise(runs):
        assert len(run) == most or run.stop != after.start


def test_neighbours_of_what_is_taken_are_worth_a_little_more() -> None:
    costs = np.array([np.inf, 9, 3, 5, 2, 9])
    assert side_by_side(costs, [], 1, worth=0.0) == [4]
    assert side_by_side(costs, [2], 1, worth=0.0) == [4]
    assert side_by_side(np.array([np.inf, 9, np.inf, 5, 2, 9]), [2], 2, worth=4.0) == [3, 4]


def test_of_equals_the_longest_run_is_taken_from_its_upper_end() -> None:
    costs = np.array([np.inf, 0, 0, 0, np.inf, 0, 0, np.inf])
    assert side_by_side(costs, [], 5, worth=1.0) == [3, 2, 1, 6, 5]


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, np.inf]), min_size=1, max_size=20),
    st.sets(st.integers(0, 19)),
    st.integers(0, 25),
)
def test_only_what_can_be_had_is_taken_and_once(
    prices: list[float], taken: set[int], most: int
) -> None:
    costs = np.array(prices)
    chosen = side_by_side(costs, {slot for slot in taken if slot < len(costs)}, most, worth=1.0)
    assert len(set(chosen)) == len(chosen) == min(most, int(np.isfinite(costs).sum()))
    assert np.isfinite(costs[chosen]).all()
