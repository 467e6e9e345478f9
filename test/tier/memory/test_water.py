"""When an engine lends and when it takes back."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swiftcache_tier.donor.water import Levels, WaterMarks
from swiftcache_tier.errors import SwiftCacheError

MARKS = WaterMarks(low=0.2, high=0.3)


def levels(free: int, cold: int = 0, needed: int = 0) -> Levels:
    return Levels(capacity=100, free=free, cold=cold, needed=needed)


def test_it_lends_down_to_the_high_mark() -> None:
    assert MARKS.to_lend(levels(100), extent_pages=4, lent=0, demand=99) == 17
    assert MARKS.to_lend(levels(100), extent_pages=4, lent=0, demand=3) == 3
    assert MARKS.to_lend(levels(33), extent_pages=4, lent=10, demand=99) == 0


def test_what_is_cold_counts_as_spare_and_what_is_needed_does_not() -> None:
    assert MARKS.to_lend(levels(20, cold=18), extent_pages=4, lent=0, demand=99) == 2
    assert MARKS.to_lend(levels(100, needed=66), extent_pages=4, lent=0, demand=99) == 1


def test_no_more_is_lent_than_the_fraction() -> None:
    half = WaterMarks(low=0.2, high=0.3, most=0.5)
    assert half.to_lend(levels(100), extent_pages=4, lent=0, demand=99) == 12
    assert half.to_lend(levels(52), extent_pages=4, lent=12, demand=99) == 0


def test_it_takes_back_under_the_low_mark_up_to_the_middle() -> None:
    assert MARKS.to_take_back(levels(20), extent_pages=4, lent=10, asked=0) == 0
    assert MARKS.to_take_back(levels(19), extent_pages=4, lent=10, asked=0) == 2
    assert MARKS.to_take_back(levels(19), extent_pages=4, lent=10, asked=1) == 0
    assert MARKS.to_take_back(levels(0, needed=200), extent_pages=4, lent=10, asked=3) == 7


@given(
    free=st.integers(0, 100),
    cold=st.integers(0, 100),
    needed=st.integers(0, 100),
    extent_pages=st.floats(1, 20),
    lent=st.integers(0, 20),
    demand=st.integers(0, 50),
)
def test_what_was_lent_is_not_asked_back_at_once(
    free: int, cold: int, needed: int, extent_pages: float, lent: int, demand: int
) -> None:
    before = levels(free, cold, needed)
    extents = MARKS.to_lend(before, extent_pages, lent, demand)
    after = before._replace(free=round(before.free - extents * extent_pages))
    if extents:
        assert MARKS.to_take_back(after, extent_pages, lent + extents, 0) == 0


@pytest.mark.parametrize(
    ("marks", "word"),
    [
        ({"low": 0.4, "high": 0.3}, "the low one under the high one"),
        ({"low": -0.1}, "fractions"),
        ({"high": 1.5}, "fractions"),
        ({"high": 1.0}, "nothing is left to lend"),
        ({"most": 0.0}, "donation of 0"),
        ({"most": 1.1}, "donation of 1.1"),
    ],
)
def test_marks_that_could_not_work_are_refused(marks: dict[str, float], word: str) -> None:
    with pytest.raises(SwiftCacheError, match=word):
        WaterMarks(**marks)
