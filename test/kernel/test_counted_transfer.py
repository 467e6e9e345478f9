"""Batches whose length is told on the device: loaded again and again, moved by one launch."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from kernel.cases import Shape, bytes_of, expect_gather, expect_scatter, shapes
from kernel.test_layer_transfer import batches, contents, donor, interpreted, pool_of

from swiftcache_kernel.counted_transfer import CountedTransfer
from swiftcache_kernel.triton_kernels import Grid

pytestmark = [
    interpreted,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(Grid(3), id="few-programs"),
        pytest.param(Grid(2, tile_words=512, launches=3), id="several-launches"),
        pytest.param(Grid(1000, tile_words=512, stages=1, warps=1), id="a-tile-each"),
    ],
)
@settings(max_examples=10, deadline=None)
@given(shape=shapes(), batch=batches())
def test_what_was_loaded_last_is_moved(
    grid: Grid, shape: Shape, batch: tuple[list[int], list[int]]
) -> None:
    numbers, pages = batch
    room = max(*numbers, *pages) + 2
    with donor(shape, room, seed=1) as (base, size):
        table = [base + number * shape.layout.block_bytes for number in numbers]
        pool = pool_of(shape, room, seed=2)
        gather, scatter = (
            CountedTransfer(pool, len(table) + 1, gather=way, grid=grid) for way in (True, False)
        )
        untouched = contents(pool)
        for transfer in (gather, scatter):
            transfer.move(0)
        assert contents(pool) == untouched, "nothing was loaded, something moved"
        for count in (len(table), len(table) // 2, 0):
            gather.load(array(table[:count]), array(pages[:count]))
            scatter.load(array(table[:count]), array(pages[:count]))
            for layer in range(shape.layers):
                before = contents(pool)[layer]
                expected = expect_gather(
                    ctypes.string_at, table[:count], pages[:count], *before, shape.layout, layer
                )
                gather.move(layer)
                assert contents(pool)[layer] == expected
            pool_now = pool_of(shape, room, seed=3 + count)
            for mine, other in zip((*pool.k, *pool.v), (*pool_now.k, *pool_now.v), strict=True):
                mine.view(torch.uint8).copy_(other.view(torch.uint8))
            for layer in range(shape.layers):
                memory = ctypes.string_at(base, size)
                expected_memory = expect_scatter(
                    memory,
                    base,
                    table[:count],
                    pages[:count],
                    bytes_of(pool.k[layer]),
                    bytes_of(pool.v[layer]),
                    shape.layout,
                    layer,
                )
                scatter.move(layer)
                assert ctypes.string_at(base, size) == expected_memory


def test_more_than_the_capacity_is_refused() -> None:
    shape = Shape(torch.float32, page_tokens=4, layers=2, heads=1, k_dim=4, v_dim=4)
    transfer = CountedTransfer(pool_of(shape, 4, seed=1), 2, gather=True)
    with pytest.raises(ValueError, match="table has 3 blocks, pages has 3; expected as many, up"):
        transfer.load(array([0, 1, 2]), array([0, 1, 2]))
    with pytest.raises(ValueError, match="layer is 2"):
        transfer.move(2)
