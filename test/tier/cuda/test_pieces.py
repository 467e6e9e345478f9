"""The record of which parts of a range are mapped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.extents.pieces import Pieces

UNITS = 12
GRANULE = 8

place = st.tuples(st.integers(-1, UNITS + 1), st.integers(-1, UNITS))


def _run(mapped: dict[int, int], unit: int, units: int) -> list[int]:
    """The pieces that fill these units exactly; none if they do not."""
    run, end = [], unit
    while end in mapped and end < unit + units:
        run.append(end)
        end += mapped[end]
    return run if end == unit + units else []


@given(st.lists(st.tuples(st.booleans(), place), max_size=30))
def test_pieces_never_overlap(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    pieces = Pieces(UNITS * GRANULE, GRANULE)
    mapped: dict[int, int] = {}
    for adding, (unit, units) in steps:
        offset, size_bytes = unit * GRANULE, units * GRANULE
        taken = {u for first, count in mapped.items() for u in range(first, first + count)}
        wanted = set(range(unit, unit + units))
        if adding:
            possible = bool(wanted) and wanted <= set(range(UNITS)) and not wanted & taken
            if possible:
                pieces.require_free(offset, size_bytes)
                pieces.add(offset, size_bytes)
                mapped[unit] = units
            else:
                with pytest.raises(ValueError, match="offset"):
                    pieces.require_free(offset, size_bytes)
        elif run := _run(mapped, unit, units):
            found = pieces.require_mapped(offset, size_bytes)
            assert found == [u * GRANULE for u in run]
            pieces.remove(found)
            for u in run:
                del mapped[u]
        else:
            with pytest.raises(ValueError, match="no extent"):
                pieces.require_mapped(offset, size_bytes)
        assert dict(pieces) == {u * GRANULE: n * GRANULE for u, n in mapped.items()}
        assert pieces.mapped_bytes == sum(mapped.values()) * GRANULE
