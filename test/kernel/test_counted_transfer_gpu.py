"""Captured launches that move whatever batch was loaded before the replay."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from kernel.cases import Shape, bytes_of, expect_gather
from kernel.gpu_cases import GPU, PLACES, donor_memory, gpu_pool, needs_gpu

from swiftcache_kernel.counted_transfer import CountedTransfer
from swiftcache_kernel.triton_kernels import COUNTED_GRID, Grid

pytestmark = needs_gpu

SHAPE = Shape(torch.bfloat16, page_tokens=16, layers=3, heads=8, k_dim=128, v_dim=128)
BLOCKS, PAGES = 300, 400
GRIDS = [
    COUNTED_GRID,
    Grid(8, tile_words=4096, stages=4),
    Grid(32, tile_words=4096, stages=5),
    Grid(32, launches=8),
    Grid(1_000_000, tile_words=1024, stages=1, warps=4),
    Grid(1_000_000, tile_words=512, stages=1, warps=1),
    Grid(264, tile_words=2048, stages=1, warps=4, launches=8),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_graph_moves_what_was_loaded_before_its_replay(place: str, grid: Grid) -> None:
    layout = SHAPE.layout
    memory = donor_memory(BLOCKS * layout.block_bytes, place)
    base, donor = memory.data_ptr(), bytes_of(memory.cpu())
    pool = gpu_pool(SHAPE, PAGES, seed=1)
    transfer = CountedTransfer(pool, BLOCKS, gather=True, grid=grid)
    stream, graph = torch.cuda.Stream(GPU), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        transfer.move(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(SHAPE.layers):
                transfer.move(layer)
        rng = random.Random(3)
        for count in (BLOCKS, 1, 0, 77):
            table = [base + n * layout.block_bytes for n in rng.sample(range(BLOCKS), count)]
            pages = rng.sample(range(PAGES), count)
            before = [(bytes_of(k), bytes_of(v)) for k, v in zip(pool.k, pool.v, strict=True)]
            transfer.load(np.array(table, dtype=np.int64), np.array(pages, dtype=np.int64))
            graph.replay()
            stream.synchronize()
            for layer in range(SHAPE.layers):
                expected = expect_gather(
                    lambda address, size: donor[address - base : address - base + size],
                    table,
                    pages,
                    *before[layer],
                    layout,
                    layer,
                )
                assert (bytes_of(pool.k[layer]), bytes_of(pool.v[layer])) == expected


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_scattered_from_one_pool_arrives_in_another(grid: Grid) -> None:
    layout = SHAPE.layout
    memory = donor_memory(BLOCKS * layout.block_bytes, "cuda:0")
    sent, received = (gpu_pool(SHAPE, PAGES, seed) for seed in (1, 2))
    expected = gpu_pool(SHAPE, PAGES, seed=2)
    table = memory.data_ptr() + np.arange(BLOCKS, dtype=np.int64)[::-1] * layout.block_bytes
    pages = np.random.default_rng(4).permutation(PAGES)[:BLOCKS]
    for pool, gather in ((sent, False), (received, True)):
        transfer = CountedTransfer(pool, PAGES, gather=gather, grid=grid)
        transfer.load(table, pages)
        for layer in range(SHAPE.layers):
            transfer.move(layer)
    torch.cuda.synchronize()
    slots = (torch.from_numpy(pages)[:, None] * 16 + torch.arange(16)).flatten().to(GPU)
    for ours, theirs, got in (
        *zip(sent.k, expected.k, received.k, strict=True),
        *zip(sent.v, expected.v, received.v, strict=True),
    ):
        theirs[slots] = ours[slots]
        assert bytes_of(got) == bytes_of(theirs)
