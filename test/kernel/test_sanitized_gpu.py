"""Each kernel once, on few blocks: what runs under compute-sanitizer (see sgl-kernel/README.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel.cases import Shape, bytes_of
from kernel.gpu_cases import donor_memory, gpu_pool, needs_gpu, on_gpu

from swiftcache_kernel import (
    Path,
    block_checksums,
    copy_blocks,
    layer_transfer,
    page_checksums,
)
from swiftcache_kernel.counted_transfer import CountedTransfer

pytestmark = needs_gpu

SHAPES = [
    # Runs of one tile, runs that end within a tile, several blocks to a tile; words of 2 bytes.
    Shape(torch.bfloat16, page_tokens=16, layers=2, heads=8, k_dim=128, v_dim=128),
    Shape(torch.bfloat16, page_tokens=16, layers=2, heads=3, k_dim=96, v_dim=64),
    Shape(torch.bfloat16, page_tokens=1, layers=2, heads=2, k_dim=64, v_dim=64),
    Shape(torch.bfloat16, page_tokens=1, layers=2, heads=1, k_dim=5, v_dim=3),
]


@pytest.mark.parametrize("programs", [3, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers(shape: Shape, programs: int) -> None:
    """Out and back: what is stored from one pool arrives in another."""
    blocks = 11
    memory = donor_memory(blocks * shape.layout.block_bytes, "cuda:0")
    table = on_gpu([memory.data_ptr() + row * shape.layout.block_bytes for row in range(blocks)])
    pages = on_gpu(range(blocks))[torch.randperm(blocks)]
    sent, received = (gpu_pool(shape, blocks, seed) for seed in (1, 2))
    path = Path("kernel", programs)
    out = layer_transfer(table, pages, sent, path=path)
    out.scatter_all()
    out.scatter(1)
    back = layer_transfer(table, pages, received, path=path)
    back.gather(0)
    back.gather_layers(0, shape.layers)
    torch.cuda.synchronize()
    for buffers in ("k", "v"):
        for before, after in zip(getattr(sent, buffers), getattr(received, buffers), strict=True):
            assert bytes_of(before) == bytes_of(after)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_counted_layers(shape: Shape) -> None:
    """As the layer stream moves them, with fewer blocks than there is room for."""
    blocks = 7
    memory = donor_memory(blocks * shape.layout.block_bytes, "cuda:0")
    table = memory.data_ptr() + np.arange(blocks) * shape.layout.block_bytes
    pages = np.random.default_rng(1).permutation(blocks)
    sent, received = (gpu_pool(shape, blocks, seed) for seed in (1, 2))
    for pool, gather in ((sent, False), (received, True)):
        transfer = CountedTransfer(pool, blocks + 3, gather=gather)
        transfer.load(table, pages)
        for layer in range(shape.layers):
            transfer.move(layer)
    torch.cuda.synchronize()
    for buffers in ("k", "v"):
        for before, after in zip(getattr(sent, buffers), getattr(received, buffers), strict=True):
            assert bytes_of(before) == bytes_of(after)


@pytest.mark.parametrize("block_bytes", [3 * 16384 + 48, 40_002])
def test_blocks(block_bytes: int) -> None:
    blocks = 5
    source, target = (donor_memory(blocks * block_bytes, "cuda:0", seed) for seed in (1, 2))
    tables = (
        on_gpu([memory.data_ptr() + row * block_bytes for row in range(blocks)])
        for memory in (source, target)
    )
    copy_blocks(*tables, block_bytes=block_bytes)
    torch.cuda.synchronize()
    assert bytes_of(target) == bytes_of(source)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_checksums(shape: Shape) -> None:
    blocks = 5
    memory = donor_memory(blocks * shape.layout.block_bytes, "cuda:0")
    table = on_gpu([memory.data_ptr() + row * shape.layout.block_bytes for row in range(blocks)])
    pool = gpu_pool(shape, blocks, seed=1)
    pages = on_gpu([3, 0, 4, 2, 1])
    layer_transfer(table, pages, pool).scatter_all()
    assert block_checksums(table, shape.layout).tolist() == page_checksums(pages, pool).tolist()
