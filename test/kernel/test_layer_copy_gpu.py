"""Gather and scatter on a GPU: own memory, a peer's over NVLink, pinned host memory."""

from __future__ import annotations

import random

import pytest
import torch
from kernel.cases import Shape, all_shapes, bytes_of, expect_gather, expect_scatter
from kernel.gpu_cases import donor_memory, needs_gpu, on_gpu

from swiftcache_kernel import gather_layer, scatter_layer, triton_kernels

pytestmark = needs_gpu

BLOCKS, POOL_PAGES = 9, 11
BIG = Shape(torch.bfloat16, page_tokens=16, layers=2, heads=8, k_dim=128, v_dim=128)


def check_both_ways(
    shape: Shape,
    memory: torch.Tensor,
    blocks: int,
    pool_pages: int,
    moved: int,
    **options: int,
) -> None:
    layout = shape.layout
    gather = triton_kernels.gather_layer if options else gather_layer
    scatter = triton_kernels.scatter_layer if options else scatter_layer
    base = memory.data_ptr()
    chosen = random.Random(1)
    table = [base + row * layout.block_bytes for row in chosen.sample(range(blocks), moved)]
    pages = chosen.sample(range(pool_pages), moved)
    for layer in range(shape.layers):
        before = bytes_of(memory)

        def read(address: int, size: int, before: bytes = before) -> bytes:
            return before[address - base : address - base + size]

        host_k, host_v = shape.pool(pool_pages, seed=layer)
        k, v = host_k.cuda(), host_v.cuda()
        expected = expect_gather(
            read, table, pages, bytes_of(host_k), bytes_of(host_v), layout, layer
        )
        gather(on_gpu(table), on_gpu(pages), k, v, layout=layout, layer=layer, **options)
        torch.cuda.synchronize()
        assert (bytes_of(k), bytes_of(v)) == expected

        k, v = (buffer.cuda() for buffer in shape.pool(pool_pages, seed=100 + layer))
        after = expect_scatter(before, base, table, pages, bytes_of(k), bytes_of(v), layout, layer)
        scatter(on_gpu(table), on_gpu(pages), k, v, layout=layout, layer=layer, **options)
        torch.cuda.synchronize()
        assert bytes_of(memory) == after


@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_every_shape_both_ways(shape: Shape) -> None:
    memory = donor_memory(BLOCKS * shape.layout.block_bytes, "cuda:0")
    check_both_ways(shape, memory, BLOCKS, POOL_PAGES, moved=5)


@pytest.mark.parametrize("place", ["host", "cuda:1"])
def test_memory_elsewhere(place: str) -> None:
    memory = donor_memory(64 * BIG.layout.block_bytes, place)
    check_both_ways(BIG, memory, blocks=64, pool_pages=70, moved=50)


@pytest.mark.parametrize("programs", [1, 7, 17, 4096])
def test_any_grid_moves_all_tiles(programs: int) -> None:
    short = Shape(torch.bfloat16, page_tokens=1, layers=1, heads=1, k_dim=40, v_dim=24)
    for shape in (BIG, short):
        memory = donor_memory(400 * shape.layout.block_bytes, "cuda:0")
        check_both_ways(shape, memory, 400, 410, moved=300, programs=programs)


def test_one_table_names_host_and_device_memory() -> None:
    layout = BIG.layout
    near, far = (donor_memory(layout.block_bytes, place) for place in ("cuda:0", "host"))
    k, v = (buffer.cuda() for buffer in BIG.pool(2, seed=1))
    table = on_gpu([far.data_ptr(), near.data_ptr()])
    gather_layer(table, on_gpu([0, 1]), k, v, layout=layout, layer=1)
    torch.cuda.synchronize()
    for page, memory in enumerate((far, near)):
        run = bytes_of(memory)[layout.layer_bytes :]
        assert bytes_of(k[page * 16 : (page + 1) * 16]) == run[: layout.k_bytes]
        assert bytes_of(v[page * 16 : (page + 1) * 16]) == run[layout.k_bytes :]


def test_captured_graph_reads_table_and_pages_at_replay() -> None:
    layout = BIG.layout
    memory = donor_memory(3 * layout.block_bytes, "cuda:0")
    k, v = (buffer.cuda() for buffer in BIG.pool(3, seed=2))
    table, pages = on_gpu([memory.data_ptr()]), on_gpu([0])
    gather_layer(table, pages, k, v, layout=layout, layer=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_layer(table, pages, k, v, layout=layout, layer=0)
    table.add_(2 * layout.block_bytes)
    pages.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    run = bytes_of(memory)[2 * layout.block_bytes :]
    assert bytes_of(k[16:32]) == run[: layout.k_bytes]
    assert bytes_of(v[16:32]) == run[layout.k_bytes : layout.layer_bytes]


def test_copy_runs_on_the_current_stream() -> None:
    """Queued behind work of the same stream, so that it reads what that work wrote."""
    layout = BIG.layout
    memory = torch.zeros(64 * layout.block_bytes, dtype=torch.uint8, device="cuda:0")
    k, v = (torch.zeros_like(buffer, device="cuda:0") for buffer in BIG.pool(64, seed=3))
    table = on_gpu([memory.data_ptr() + row * layout.block_bytes for row in range(64)])
    pages = on_gpu(range(64))
    gather_layer(table, pages, k, v, layout=layout, layer=0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        memory.fill_(1)
        gather_layer(table, pages, k, v, layout=layout, layer=0)
    stream.synchronize()
    assert set(bytes_of(k)) == {1}
    assert set(bytes_of(v)) == {1}
