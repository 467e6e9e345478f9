"""Batches moved layer by layer on a GPU, by the kernels and by the copy engines."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel.cases import Shape, all_shapes, bytes_of, expect_gather, expect_scatter
from kernel.gpu_cases import GPU, PLACES, donor_memory, gpu_pool, needs_gpu, on_gpu

from swiftcache_kernel import (
    COPY_ENGINE,
    LayerTransfer,
    Path,
    PoolBuffers,
    find_runs,
    layer_transfer,
)

pytestmark = needs_gpu

BIG = Shape(torch.bfloat16, page_tokens=16, layers=3, heads=8, k_dim=128, v_dim=128)
PATHS = [Path("kernel", 8), Path("kernel", 32), COPY_ENGINE]
each_path = pytest.mark.parametrize("path", PATHS, ids=str)


@pytest.fixture(autouse=True)
def own_stream() -> Iterator[None]:
    """Batches of copies are not taken on the default stream."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def transfer_of(table: list[int], pages: list[int], pool: PoolBuffers, path: Path) -> LayerTransfer:
    runs = find_runs(
        np.array(table, dtype=np.int64), np.array(pages, dtype=np.int64), pool.layout.block_bytes
    )
    return layer_transfer(on_gpu(table), on_gpu(pages), pool, path=path, runs=runs)


def contents(pool: PoolBuffers, layer: int) -> tuple[bytes, bytes]:
    return bytes_of(pool.k[layer]), bytes_of(pool.v[layer])


def check_both_ways(
    shape: Shape, memory: torch.Tensor, ids: list[int], pages: list[int], path: Path
) -> None:
    """Gather every layer, several at once, scatter every layer, all at once; compare every byte."""
    layout = shape.layout
    base = memory.data_ptr()
    table = [base + number * layout.block_bytes for number in ids]
    room = max(pages) + 2
    donor = bytes_of(memory)

    def read(address: int, size: int) -> bytes:
        return donor[address - base : address - base + size]

    pool = gpu_pool(shape, room, seed=1)
    transfer = transfer_of(table, pages, pool, path)
    for layer in range(shape.layers):
        expected = expect_gather(read, table, pages, *contents(pool, layer), layout, layer)
        transfer.gather(layer)
        torch.cuda.synchronize()
        assert contents(pool, layer) == expected

    pool = gpu_pool(shape, room, seed=4)
    first = shape.layers // 3
    expected_pool = [contents(pool, layer) for layer in range(shape.layers)]
    for layer in range(first, shape.layers):
        expected_pool[layer] = expect_gather(
            read, table, pages, *expected_pool[layer], layout, layer
        )
    transfer_of(table, pages, pool, path).gather_layers(first, shape.layers - first)
    torch.cuda.synchronize()
    assert [contents(pool, layer) for layer in range(shape.layers)] == expected_pool

    for seed, at_once in ((2, False), (3, True)):
        pool = gpu_pool(shape, room, seed)
        transfer = transfer_of(table, pages, pool, path)
        expected_memory = bytes_of(memory)
        for layer in range(shape.layers):
            expected_memory = expect_scatter(
                expected_memory, base, table, pages, *contents(pool, layer), layout, layer
            )
        if at_once:
            transfer.scatter_all()
        else:
            for layer in range(shape.layers):
                transfer.scatter(layer)
        torch.cuda.synchronize()
        assert bytes_of(memory) == expected_memory


@each_path
@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_every_shape(shape: Shape, path: Path) -> None:
    memory = donor_memory(9 * shape.layout.block_bytes, "cuda:0")
    check_both_ways(shape, memory, [4, 0, 8, 1, 5], [3, 9, 0, 2, 7], path)


@each_path
@pytest.mark.parametrize("place", PLACES)
def test_scattered_blocks(place: str, path: Path) -> None:
    memory = donor_memory(64 * BIG.layout.block_bytes, place)
    chosen = random.Random(2)
    ids, pages = chosen.sample(range(64), 50), chosen.sample(range(70), 50)
    check_both_ways(BIG, memory, ids, pages, path)


@each_path
@pytest.mark.parametrize("place", PLACES)
def test_a_few_runs(place: str, path: Path) -> None:
    memory = donor_memory(64 * BIG.layout.block_bytes, place)
    ids = [*range(40, 60), *range(10), *range(10, 30)]
    pages = [*range(20), *range(50, 60), *range(70, 90)]
    check_both_ways(BIG, memory, ids, pages, path)


@each_path
def test_copies_run_on_the_current_stream(path: Path) -> None:
    """Queued behind work of the same stream, so that they read what that work wrote."""
    memory = torch.zeros(64 * BIG.layout.block_bytes, dtype=torch.uint8, device=GPU)
    pool = gpu_pool(BIG, 64, seed=4)
    table = [memory.data_ptr() + row * BIG.layout.block_bytes for row in range(64)]
    transfer = transfer_of(table, list(range(64)), pool, path)
    transfer.gather(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    memory.fill_(1)
    transfer.gather(0)
    torch.cuda.current_stream().synchronize()
    assert [set(run) for run in contents(pool, 0)] == [{1}, {1}]


def test_a_graph_reads_table_and_pages_at_replay() -> None:
    layout = BIG.layout
    memory = donor_memory(3 * layout.block_bytes, "cuda:0")
    pool = gpu_pool(BIG, 3, seed=5)
    transfer = transfer_of([memory.data_ptr()], [0], pool, Path("kernel", 32))
    transfer.gather(1)
    transfer.scatter_all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transfer.gather(1)
        transfer.scatter_all()
    transfer.table.add_(2 * layout.block_bytes)
    transfer.pages.fill_(2)
    before = bytes_of(memory)
    graph.replay()
    torch.cuda.synchronize()
    stored = bytes_of(memory)
    block = slice(2 * layout.block_bytes, None)
    runs = [
        buffer[2 * len(buffer) // 3 :] for layer in range(3) for buffer in contents(pool, layer)
    ]
    assert stored[block] == b"".join(runs)
    assert runs[2] + runs[3] == before[block][layout.layer_bytes : 2 * layout.layer_bytes]
    assert stored[: 2 * layout.block_bytes] == before[: 2 * layout.block_bytes]


@pytest.mark.parametrize("pages", [[0, 1], list(range(16))], ids=["batch", "run"])
def test_a_graph_does_not_capture_the_copy_engine(pages: list[int]) -> None:
    memory = donor_memory(16 * BIG.layout.block_bytes, "cuda:0")
    pool = gpu_pool(BIG, 16, seed=6)
    table = [memory.data_ptr() + row * BIG.layout.block_bytes for row in pages]
    transfer = transfer_of(table, pages, pool, COPY_ENGINE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="no use in a CUDA graph"):
        transfer.gather(0)


def test_a_batch_of_copies_refuses_the_default_stream() -> None:
    memory = donor_memory(2 * BIG.layout.block_bytes, "cuda:0")
    transfer = transfer_of([memory.data_ptr()], [1], gpu_pool(BIG, 2, seed=7), COPY_ENGINE)
    with (
        torch.cuda.stream(torch.cuda.default_stream(GPU)),
        pytest.raises(RuntimeError, match="default stream"),
    ):
        transfer.gather(0)


def test_the_copy_engine_needs_the_batch_on_the_host() -> None:
    pool = gpu_pool(BIG, 2, seed=8)
    with pytest.raises(ValueError, match=r"^the copy engine needs .* runs is None"):
        layer_transfer(on_gpu([0]), on_gpu([0]), pool, path=COPY_ENGINE)


@each_path
@pytest.mark.parametrize("ordinal", [0, 1], ids=["own", "peer"])
def test_a_run_spans_the_extents_of_another_process(ordinal: int, path: Path) -> None:
    """Extents are mapped back to back: runs of blocks, and blocks themselves, lie across edges."""
    from support.gpu_memory import GpuView, gpu_donor
    from swiftcache_tier.cuda_driver import can_access_peer, device_count
    from swiftcache_tier.extents.cuda_address_range import CudaAddressRange

    if ordinal >= device_count() or not can_access_peer(0, ordinal):
        pytest.skip("needs two GPUs that can address each other")
    extent_bytes, extents = 2 << 20, 4
    shape = Shape(torch.bfloat16, page_tokens=16, layers=5, heads=8, k_dim=128, v_dim=128)
    layout = shape.layout
    blocks = extents * extent_bytes // layout.block_bytes
    assert extent_bytes % layout.block_bytes
    assert extent_bytes % layout.k_bytes == 0
    memory = bytes_of(donor_memory(extents * extent_bytes, "cuda:0", seed=9))
    pool = gpu_pool(shape, blocks, seed=10)
    addresses = CudaAddressRange(extents * extent_bytes, ordinal=0)
    view = GpuView(0)
    try:
        with gpu_donor(ordinal, extent_bytes, extents) as donor:
            for number in range(extents):
                descriptor = donor.share(number)
                try:
                    addresses.map(number * extent_bytes, descriptor, extent_bytes)
                finally:
                    os.close(descriptor)
            view.write(addresses.base, memory)
            table = [addresses.base + row * layout.block_bytes for row in range(blocks)]
            transfer = transfer_of(table, list(range(blocks)), pool, path)
            for layer in range(shape.layers):
                transfer.gather(layer)
            torch.cuda.synchronize()
            for layer in range(shape.layers):
                starts = [
                    row * layout.block_bytes + layout.k_offset(layer) for row in range(blocks)
                ]
                k = b"".join(memory[start : start + layout.k_bytes] for start in starts)
                v = b"".join(
                    memory[start + layout.k_bytes : start + layout.layer_bytes] for start in starts
                )
                assert contents(pool, layer) == (k, v)
            other = gpu_pool(shape, blocks, seed=11)
            transfer_of(table, list(range(blocks)), other, path).scatter_all()
            torch.cuda.synchronize()
            stored = view.read(addresses.base, blocks * layout.block_bytes)
            for layer in range(shape.layers):
                k, v = contents(other, layer)
                for row in range(blocks):
                    start = row * layout.block_bytes + layout.k_offset(layer)
                    k_run = k[row * layout.k_bytes : (row + 1) * layout.k_bytes]
                    v_run = v[row * layout.v_bytes : (row + 1) * layout.v_bytes]
                    assert stored[start : start + layout.layer_bytes] == k_run + v_run
    finally:
        torch.cuda.synchronize()
        addresses.close()
        view.close()
