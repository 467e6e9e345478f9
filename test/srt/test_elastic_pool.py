"""The memory of a pool whose extents can be lent."""

from __future__ import annotations

import pytest
import torch

from support.elastic_tree import ElasticTree

EXTENT_BYTES = 4096
EXTENTS = 8


@pytest.mark.parametrize(
    ("slots", "kernels"),
    [([], 0), ([0], 1), ([7], 1), ([5, 4, 6], 1), ([7, 2, 5, 1], 3), (range(EXTENTS), 1)],
)
def test_extents_are_zeroed_with_one_kernel_for_neighbours(
    slots: list[int], kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", str(EXTENT_BYTES))
    tree = ElasticTree(EXTENTS * 8 - 1)
    tree.pool.raw_pages.fill_(7)
    with torch.profiler.profile() as profile:
        tree.pool.zero_extents(slots)
    assert sum(event.name == "aten::zero_" for event in profile.events()) == kernels
    zeroed = (tree.pool.raw_pages.view(EXTENTS, EXTENT_BYTES) == 0).all(dim=1)
    assert zeroed.nonzero().flatten().tolist() == sorted(slots)
    assert tree.pool.raw_pages.count_nonzero() == (EXTENTS - len(slots)) * EXTENT_BYTES
    tree.close()
