"""Batches are cut into runs of neighbours."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_kernel import Runs, find_runs

BLOCK_BYTES = 48


def cut(ids: list[int], pages: list[int]) -> Runs:
    return find_runs(
        np.array(ids, dtype=np.int64) * BLOCK_BYTES, np.array(pages, dtype=np.int64), BLOCK_BYTES
    )


def lengths(ids: list[int], pages: list[int]) -> list[int]:
    return cut(ids, pages).lengths.tolist()


# Few distinct numbers, so that neighbours are common.
PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30)


@given(PAIRS)
def test_runs_are_whole_and_as_long_as_they_can_be(pairs: list[tuple[int, int]]) -> None:
    runs = cut([block for block, _ in pairs], [page for _, page in pairs])
    assert runs.blocks == len(pairs)
    bounds = [*runs.starts.tolist(), len(pairs)]
    assert bounds == sorted(set(bounds))
    assert bounds[0] == 0
    assert len(runs) == len(bounds) - 1
    assert runs.lengths.tolist() == [b - a for a, b in pairwise(bounds)]
    for i in range(1, len(pairs)):
        (block, page), (next_block, next_page) = pairs[i - 1], pairs[i]
        together = (next_block - block, next_page - page) == (1, 1)
        assert together == (i not in bounds)


def test_known_batches() -> None:
    assert lengths([], []) == []
    assert lengths([7], [3]) == [1]
    assert lengths([4, 5, 6], [0, 1, 2]) == [3]
    assert lengths([4, 5, 6], [0, 1, 3]) == [2, 1]
    assert lengths([4, 5, 7], [0, 1, 2]) == [2, 1]
    assert lengths([6, 5, 4], [2, 1, 0]) == [1, 1, 1]
    assert lengths([4, 4], [0, 1]) == [1, 1]


def test_ranges_that_do_not_differ_by_whole_blocks_do_not_join() -> None:
    addresses = np.array([0, BLOCK_BYTES, 2 * BLOCK_BYTES + 16], dtype=np.int64)
    pages = np.arange(3, dtype=np.int64)
    assert find_runs(addresses, pages, BLOCK_BYTES).lengths.tolist() == [2, 1]


def test_a_run_stays_with_one_donor() -> None:
    ids, pages = np.arange(5, dtype=np.int64), np.arange(5, dtype=np.int64)
    owners = np.array([7, 7, 0, 0, 7], dtype=np.int64)
    runs = find_runs(ids * BLOCK_BYTES, pages, BLOCK_BYTES, owners)
    assert runs.lengths.tolist() == [2, 2, 1]


INT64 = np.zeros(2, dtype=np.int64)


@pytest.mark.parametrize(
    ("addresses", "pages", "message"),
    [
        (INT64, INT64[:1], "2 addresses, 1 pages, 2 owners"),
        (INT64.astype(np.int32), INT64, r"addresses is int32 \[2\]; expected int64 \[n\]"),
        (INT64, INT64.astype(np.uint64), r"pages is uint64 \[2\]"),
        (INT64.reshape(1, 2), INT64, r"addresses is int64 \[1, 2\]"),
    ],
)
def test_what_is_no_batch_is_refused(
    addresses: np.ndarray, pages: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        find_runs(addresses, pages, BLOCK_BYTES)
    assert "\n" not in str(error.value)
