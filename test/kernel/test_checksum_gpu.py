"""The compiled kernels give the checksums of the reference, wherever the memory lies."""

from __future__ import annotations

import ctypes

import pytest
import torch
from kernel.cases import Shape, all_shapes
from kernel.gpu_cases import GPU, PLACES, donor_memory, gpu_pool, needs_gpu, on_gpu

from swiftcache_kernel import PoolBuffers, block_checksums, layer_transfer, page_checksums

pytestmark = needs_gpu


def reference_of_blocks(memory: torch.Tensor, rows: list[int], shape: Shape) -> list[int]:
    """What the CPU says of a copy of the memory."""
    host = memory.cpu().contiguous()
    addresses = [host.data_ptr() + row * shape.layout.block_bytes for row in rows]
    return block_checksums(torch.tensor(addresses, dtype=torch.int64), shape.layout).tolist()


def addresses(memory: torch.Tensor, rows: list[int], shape: Shape) -> torch.Tensor:
    return on_gpu([memory.data_ptr() + row * shape.layout.block_bytes for row in rows])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_blocks(shape: Shape, place: str) -> None:
    memory = donor_memory(7 * shape.layout.block_bytes, place)
    rows = [6, 0, 3, 3]
    sums = block_checksums(addresses(memory, rows, shape), shape.layout)
    assert sums.tolist() == reference_of_blocks(memory, rows, shape)


@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_pages(shape: Shape) -> None:
    pool = gpu_pool(shape, pages=9, seed=1)
    host = PoolBuffers(shape.layout, [k.cpu() for k in pool.k], [v.cpu() for v in pool.v])
    pages = [8, 0, 5, 5]
    assert (
        page_checksums(on_gpu(pages), pool).tolist()
        == page_checksums(torch.tensor(pages), host).tolist()
    )


def test_many_blocks_there_and_back() -> None:
    """Pages of Qwen3-8B: stored, found as they were made, and one flipped bit among them seen."""
    shape = Shape(torch.bfloat16, page_tokens=16, layers=36, heads=8, k_dim=128, v_dim=128)
    blocks = 200
    pool = gpu_pool(shape, blocks, seed=2)
    memory = torch.zeros(blocks * shape.layout.block_bytes, dtype=torch.uint8, device=GPU)
    table = addresses(memory, list(range(blocks)), shape)
    pages = torch.randperm(blocks, device=GPU)
    made = page_checksums(pages, pool)
    layer_transfer(table, pages, pool).scatter_all()
    assert torch.equal(block_checksums(table, shape.layout), made)
    memory[77 * shape.layout.block_bytes + 1_234_567] ^= 16
    differ = block_checksums(table, shape.layout) != made
    assert differ.nonzero().flatten().tolist() == [77]


def test_the_work_runs_on_the_current_stream() -> None:
    shape = Shape(torch.bfloat16, page_tokens=16)
    memory = donor_memory(shape.layout.block_bytes, "cuda:0")
    pool = gpu_pool(shape, 1, seed=3)
    table, page = addresses(memory, [0], shape), on_gpu([0])
    layer_transfer(table, page, pool).scatter_all()
    made = page_checksums(page, pool).item()
    memory.zero_()
    block_checksums(table, shape.layout)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        layer_transfer(table, page, pool).scatter_all()
        sums = block_checksums(table, shape.layout)
    stream.synchronize()
    assert sums.item() == made


def test_pinned_memory_that_the_host_changes() -> None:
    shape = Shape(torch.float16, page_tokens=16)
    memory = donor_memory(2 * shape.layout.block_bytes, "host")
    table = addresses(memory, [0, 1], shape)
    before = block_checksums(table, shape.layout).tolist()
    byte = ctypes.c_ubyte.from_address(memory.data_ptr() + shape.layout.block_bytes + 5)
    byte.value ^= 1
    after = block_checksums(table, shape.layout).tolist()
    assert after[0] == before[0]
    assert after[1] != before[1]
