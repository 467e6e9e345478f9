"""How an allocation is shared out over donors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.blocks import DonorRank, Link, Room, share

rooms_strategy = st.lists(
    st.builds(
        Room,
        st.builds(DonorRank, st.sampled_from(Link), st.floats(0.001, 1000)),
        st.integers(0, 200),
    ),
    max_size=8,
)


def nvlink(free_blocks: int, gb_per_s: float = 300.0) -> Room:
    return Room(DonorRank(Link.NVLINK, gb_per_s), free_blocks)


def host(free_blocks: int) -> Room:
    return Room(DonorRank(Link.HOST, 50.0), free_blocks)


@given(st.integers(0, 1000), rooms_strategy)
def test_all_or_nothing_and_never_over_a_donors_room(blocks: int, rooms: list[Room]) -> None:
    counts = share(blocks, rooms)
    if blocks > sum(room.free_blocks for room in rooms):
        assert counts is None
    else:
        assert counts is not None
        assert sum(counts) == blocks
        assert len(counts) == len(rooms)
        assert all(0 <= c <= room.free_blocks for c, room in zip(counts, rooms, strict=True))


@given(st.integers(1, 1000), rooms_strategy)
def test_a_slower_link_is_used_only_when_the_faster_ones_are_full(
    blocks: int, rooms: list[Room]
) -> None:
    counts = share(blocks, rooms)
    if counts is None:
        return
    used = [room.rank.link for c, room in zip(counts, rooms, strict=True) if c > 0]
    for count, room in zip(counts, rooms, strict=True):
        if used and room.rank.link > min(used):
            assert count == room.free_blocks


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 900), st.integers(1000, 5000)), min_size=1, max_size=6),
)
def test_within_a_link_shares_follow_bandwidth_and_free_room(
    blocks: int, donors: list[tuple[int, int]]
) -> None:
    counts = share(blocks, [nvlink(free, gb_per_s) for gb_per_s, free in donors])
    total = sum(gb_per_s * free for gb_per_s, free in donors)
    ideals = [blocks * gb_per_s * free / total for gb_per_s, free in donors]
    if any(ideal > free for ideal, (_, free) in zip(ideals, donors, strict=True)):
        return  # one is full, and the others take over what it cannot: see the next test
    assert counts is not None
    assert all(abs(c - ideal) <= 1 for c, ideal in zip(counts, ideals, strict=True))


def test_what_a_full_donor_cannot_take_goes_to_the_others_in_proportion() -> None:
    rooms = [nvlink(100, 900.0), nvlink(1000), nvlink(1000)]
    assert share(230, rooms) == [30, 100, 100]
    assert share(1500, rooms) == [100, 700, 700]


def test_a_single_block_goes_where_most_can_follow() -> None:
    assert share(1, [nvlink(10), nvlink(1000), nvlink(20)]) == [0, 1, 0]
    assert share(1, [nvlink(100, 50.0), nvlink(100, 300.0)]) == [0, 1]


def test_equal_donors_share_equally_and_host_comes_last() -> None:
    assert share(10, [host(100), nvlink(50), nvlink(50)]) == [0, 5, 5]
    assert share(120, [host(100), nvlink(50), nvlink(50)]) == [20, 50, 50]
    peer = Room(DonorRank(Link.PCIE_PEER, 20.0), 30)
    assert share(120, [host(100), peer, nvlink(50)]) == [40, 30, 50]


def test_nothing_to_place_and_nowhere_to_place() -> None:
    assert share(0, []) == []
    assert share(0, [host(3)]) == [0]
    assert share(1, []) is None
    assert share(1, [host(0)]) is None


@pytest.mark.parametrize("gb_per_s", [0.0, -1.0, math.inf, math.nan])
def test_bandwidth_that_no_link_has_is_refused(gb_per_s: float) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        DonorRank(Link.HOST, gb_per_s)
