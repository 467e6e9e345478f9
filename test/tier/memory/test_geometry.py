"""Where blocks lie in extents, against the definition: two byte ranges that meet."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.blocks import DonorGeometry, SubRanges
from swiftcache_tier.errors import SwiftCacheError


@st.composite
def geometries(draw: st.DrawFn) -> DonorGeometry:
    block_bytes = draw(st.integers(1, 40))
    return DonorGeometry(
        block_bytes=block_bytes,
        extent_bytes=draw(st.integers(1, 40)),
        extents=draw(st.integers(1, 12)),
        offset_bytes=block_bytes * draw(st.integers(0, 5)),
    )


def touching_by_definition(geometry: DonorGeometry, slot: int) -> list[int]:
    start = slot * geometry.extent_bytes
    end = start + geometry.extent_bytes
    size = geometry.block_bytes
    return [b for b in range(geometry.blocks) if b * size < end and start < (b + 1) * size]


@given(geometries())
def test_blocks_fill_the_sub_range_without_running_over_its_end(geometry: DonorGeometry) -> None:
    sub_range_bytes = geometry.extents * geometry.extent_bytes
    left = sub_range_bytes - geometry.blocks * geometry.block_bytes
    assert 0 <= left < geometry.block_bytes
    assert geometry.first_block * geometry.block_bytes == geometry.offset_bytes


@given(geometries(), st.data())
def test_blocks_that_touch_slots(geometry: DonorGeometry, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.integers(0, geometry.extents - 1), unique=True))
    expected = Counter(b for slot in slots for b in touching_by_definition(geometry, slot))
    assert Counter(geometry.blocks_touching(slots).tolist()) == expected


@given(geometries())
def test_slots_that_blocks_touch(geometry: DonorGeometry) -> None:
    expected = Counter(
        b for slot in range(geometry.extents) for b in touching_by_definition(geometry, slot)
    )
    counts = geometry.slots_per_block().tolist()
    assert counts == [expected[b] for b in range(geometry.blocks)]


@pytest.mark.parametrize("slots", [[-1], [3], [0, 3], [1, 1]])
def test_slots_that_are_not_there_or_twice_are_refused(slots: list[int]) -> None:
    with pytest.raises(ValueError, match="slots"):
        DonorGeometry(8, 20, 3, 0).blocks_touching(slots)


@pytest.mark.parametrize("sizes", [(0, 8, 1, 0), (8, 0, 1, 0), (8, 8, 0, 0), (8, 8, 1, 12)])
def test_impossible_geometry_is_refused(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DonorGeometry(*sizes)


@given(
    block_bytes=st.integers(1, 50),
    granularity_bytes=st.sampled_from([1, 4, 16]),
    start=st.integers(0, 300),
    steps=st.lists(st.one_of(st.integers(1, 300), st.none()), max_size=30),
    data=st.data(),
)
def test_donors_get_the_first_place_where_blocks_and_extents_may_start(
    block_bytes: int,
    granularity_bytes: int,
    start: int,
    steps: list[int | None],
    data: st.DataObject,
) -> None:
    space = SubRanges(1000, start)
    taken: dict[int, int] = {}
    for size_bytes in steps:
        if size_bytes is None:
            if taken:
                offset = data.draw(st.sampled_from(sorted(taken)))
                space.give_back(offset)
                del taken[offset]
            continue
        places = (
            place
            for place in range(start, start + 1000 - size_bytes + 1)
            if place % block_bytes == 0
            and place % granularity_bytes == 0
            and all(place + size_bytes <= o or o + s <= place for o, s in taken.items())
        )
        lowest = next(places, None)
        if lowest is None:
            with pytest.raises(SwiftCacheError, match="reserve a larger range"):
                space.take(size_bytes, block_bytes, granularity_bytes)
            continue
        offset = space.take(size_bytes, block_bytes, granularity_bytes)
        assert offset == lowest
        taken[offset] = size_bytes
        assert space.taken_bytes == sum(taken.values())


def test_room_of_a_donor_that_left_is_used_again() -> None:
    space = SubRanges(10 * 4096)
    first = space.take(6 * 4096, 1000, 4096)
    with pytest.raises(SwiftCacheError, match="reserve a larger range"):
        space.take(6 * 4096, 1000, 4096)
    space.give_back(first)
    assert space.take(6 * 4096, 1000, 4096) == first
    # It fits exactly before one that stayed.
    second = space.take(4 * 4096, 4096, 4096)
    space.give_back(first)
    assert space.take(6 * 4096, 4096, 4096) == first
    space.give_back(second)
    with pytest.raises(ValueError, match="no sub-range"):
        space.give_back(4096)
