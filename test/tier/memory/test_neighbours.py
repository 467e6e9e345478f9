"""Extents that one call serves together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.extents.neighbours import runs_of


@given(st.sets(st.integers(0, 40)), st.one_of(st.none(), st.integers(1, 5)))
def test_every_slot_is_in_one_run_and_no_run_could_go_on(slots: set[int], most: int | None) -> None:
    runs = list(runs_of(slots, most))
    assert [slot for run in runs for slot in run] == sorted(slots)
    assert all(0 < len(run) <= (most or len(slots)) for run in runs)
    for run, after in pairwise(runs):
        assert len(run) == most or run.stop != after.start
