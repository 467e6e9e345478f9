"""Pages in extents: what can be lent, what goes out of use with it, what comes back."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from swiftcache_tier.blocks.page_map import PageMap


def everything_free(page_map: PageMap) -> np.ndarray:
    free = np.ones(page_map.pages, dtype=bool)
    free[0] = False
    return free


def test_the_first_extent_is_never_lent() -> None:
    page_map = PageMap(page_bytes=4, pages=12, extent_bytes=16)
    assert page_map.wholly_free(everything_free(page_map), ()).tolist() == [2, 1]


def test_an_extent_with_a_page_in_use_is_not_lent() -> None:
    page_map = PageMap(page_bytes=4, pages=12, extent_bytes=16)
    free = everything_free(page_map)
    free[9] = False
    assert page_map.wholly_free(free, ()).tolist() == [1]


def test_a_page_across_an_edge_is_out_of_use_while_either_side_is_lent() -> None:
    page_map = PageMap(page_bytes=6, pages=8, extent_bytes=16)  # edges in pages 2 and 5
    assert page_map.extents == 3
    assert page_map.hold([1]).tolist() == [2, 3, 4, 5]
    assert page_map.hold([2]).tolist() == [6, 7]
    assert page_map.release([1]).tolist() == [2, 3, 4]
    assert page_map.release([2]).tolist() == [5, 6, 7]
    assert page_map.held_count == 0


@given(page=st.integers(1, 40), pages=st.integers(2, 60), extent=st.integers(8, 90), data=st.data())
def test_pages_are_held_exactly_while_they_touch_a_lent_extent(
    page: int, pages: int, extent: int, data: st.DataObject
) -> None:
    page_map = PageMap(page, pages, extent)
    lent: set[int] = set()
    for _ in range(data.draw(st.integers(0, 12))):
        lendable = page_map.wholly_free(everything_free(page_map), lent).tolist()
        before = set(page_map.held.tolist())
        if lendable and data.draw(st.booleans()):
            slots = data.draw(st.lists(st.sampled_from(lendable), min_size=1, unique=True))
            changed = page_map.hold(slots)
            lent.update(slots)
            assert set(page_map.held.tolist()) == before | set(changed.tolist())
        elif lent:
            slots = data.draw(st.lists(st.sampled_from(sorted(lent)), min_size=1, unique=True))
            changed = page_map.release(slots)
            lent.difference_update(slots)
            assert set(page_map.held.tolist()) == before - set(changed.tolist())
        touched = {
            p
            for p in range(pages)
            for slot in lent
            if p * page < (slot + 1) * extent and (p + 1) * page > slot * extent
        }
        assert set(page_map.held.tolist()) == touched
        assert 0 not in touched


@pytest.mark.parametrize("scale", [1, 10])
def test_what_a_lend_looks_at_does_not_depend_on_what_is_lent(scale: int) -> None:
    page_map = PageMap(page_bytes=4, pages=40 * scale, extent_bytes=16)
    for slot in range(1, 10 * scale, 2):
        page_map.hold([slot])
    assert len(page_map.hold([2])) == 4
    assert len(page_map.release([2])) == 4
