"""Gather and scatter on host memory, checked byte by byte.

Every test runs on the reference (what a CPU build uses) and, where there is no GPU, on the
Triton kernels under their interpreter.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.cases import (
    DTYPES,
    Move,
    Shape,
    all_shapes,
    bytes_of,
    expect_gather,
    expect_scatter,
    make_accessible,
    reserved,
    shapes,
)

from swiftcache_kernel import gather_layer, reference, scatter_layer, triton_kernels

# NumPy 2 deprecates what Triton 3.6's interpreter does at each loop bound.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

GIB = 1 << 30

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled here, see test_layer_copy_gpu"
)
BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(triton_kernels, id="triton", marks=interpreted),
]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def tensor(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def check_gather(
    gather: Move,
    shape: Shape,
    table: Sequence[int],
    pages: Sequence[int],
    layer: int,
    pool_pages: int,
) -> None:
    """Gather into a pool of random bits, then compare every byte of the pool."""
    k, v = shape.pool(pool_pages, seed=1)
    expected = expect_gather(
        ctypes.string_at, table, pages, bytes_of(k), bytes_of(v), shape.layout, layer
    )
    gather(tensor(table), tensor(pages), k, v, layout=shape.layout, layer=layer)
    assert (bytes_of(k), bytes_of(v)) == expected


def check_scatter(
    scatter: Move,
    shape: Shape,
    memory: tuple[int, int],
    table: Sequence[int],
    pages: Sequence[int],
    layer: int,
    pool_pages: int,
) -> None:
    """Scatter a pool of random bits, then compare every byte of `memory` (address, size)."""
    k, v = shape.pool(pool_pages, seed=2)
    expected = expect_scatter(
        ctypes.string_at(*memory),
        memory[0],
        table,
        pages,
        bytes_of(k),
        bytes_of(v),
        shape.layout,
        layer,
    )
    pool_before = bytes_of(k), bytes_of(v)
    scatter(tensor(table), tensor(pages), k, v, layout=shape.layout, layer=layer)
    assert ctypes.string_at(*memory) == expected
    assert (bytes_of(k), bytes_of(v)) == pool_before


@each_backend
@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_every_shape_both_ways(backend: ModuleType, shape: Shape) -> None:
    blocks, pool_pages = 9, 11
    size = blocks * shape.layout.block_bytes
    with reserved(size) as base:
        make_accessible(base, size, seed=3)
        chosen = random.Random(4)
        ids = chosen.sample(range(blocks), 5)
        pages = chosen.sample(range(pool_pages), 5)
        table = [base + number * shape.layout.block_bytes for number in ids]
        for layer in range(shape.layers):
            check_gather(backend.gather_layer, shape, table, pages, layer, pool_pages)
            check_scatter(
                backend.scatter_layer, shape, (base, size), table, pages, layer, pool_pages
            )


@each_backend
@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=shapes())
def test_any_blocks_to_any_pages(backend: ModuleType, data: st.DataObject, shape: Shape) -> None:
    blocks, pool_pages = 6, 7
    ids = data.draw(st.lists(st.integers(0, blocks - 1), unique=True, min_size=1))
    pages = data.draw(st.permutations(range(pool_pages)))[: len(ids)]
    layer = data.draw(st.integers(0, shape.layers - 1))
    # The first byte of a donor range need not sit on a memory page.
    lead = data.draw(st.integers(0, 8)) * shape.layout.alignment_bytes
    size = lead + blocks * shape.layout.block_bytes
    with reserved(size) as base:
        make_accessible(base, size, seed=5)
        table = [base + lead + number * shape.layout.block_bytes for number in ids]
        check_gather(backend.gather_layer, shape, table, pages, layer, pool_pages)
        check_scatter(backend.scatter_layer, shape, (base, size), table, pages, layer, pool_pages)


@each_backend
@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=shapes())
def test_scatter_then_gather_restores(
    backend: ModuleType, data: st.DataObject, shape: Shape
) -> None:
    pool_pages = 5
    stored = data.draw(st.permutations(range(pool_pages)))
    restored = data.draw(st.permutations(range(pool_pages)))
    size = pool_pages * shape.layout.block_bytes
    with reserved(size) as base:
        make_accessible(base, size, seed=6)
        table = tensor([base + row * shape.layout.block_bytes for row in range(pool_pages)])
        saved = [shape.pool(pool_pages, seed=layer) for layer in range(shape.layers)]
        for layer, (k, v) in enumerate(saved):
            backend.scatter_layer(table, tensor(stored), k, v, layout=shape.layout, layer=layer)
        for layer, (k, v) in enumerate(saved):
            k2, v2 = torch.empty_like(k), torch.empty_like(v)
            backend.gather_layer(table, tensor(restored), k2, v2, layout=shape.layout, layer=layer)
            for before, after in ((k, k2), (v, v2)):
                paged = (
                    buffer.view(torch.uint8).view(pool_pages, -1) for buffer in (before, after)
                )
                old, new = paged
                assert torch.equal(new[tensor(restored)], old[tensor(stored)])


@each_backend
def test_ranges_with_unmapped_holes_between(backend: ModuleType) -> None:
    """Two reservations; in each, some blocks mapped and the rest a SIGSEGV to touch."""
    # A layer of a block is one 4 KiB memory page, so a hole can start right after it.
    shape = Shape(torch.bfloat16, page_tokens=16, layers=2, heads=1, k_dim=64, v_dim=64)
    block = shape.layout.block_bytes
    assert shape.layout.layer_bytes == 4096
    with reserved(20 * block) as left, reserved(9 * block) as right:
        mapped = [left + row * block for row in (2, 3, 11, 19)] + [right, right + 8 * block]
        # Layer 1 alone is open: layer 0 of the same blocks is part of the holes.
        opened = [address + shape.layout.layer_bytes for address in mapped]
        for seed, address in enumerate(opened):
            make_accessible(address, shape.layout.layer_bytes, seed)
        table = random.Random(7).sample(mapped, len(mapped))
        check_gather(backend.gather_layer, shape, table, [5, 0, 3, 1, 7, 2], 1, pool_pages=8)
        k, v = shape.pool(8, seed=8)
        backend.scatter_layer(
            tensor(table), tensor([5, 0, 3, 1, 7, 2]), k, v, layout=shape.layout, layer=1
        )
        check_gather(backend.gather_layer, shape, table, [1, 2, 3, 4, 5, 6], 1, pool_pages=8)
        for address, page in zip(table, [5, 0, 3, 1, 7, 2], strict=True):
            run = shape.layout.k_bytes
            start = address + shape.layout.layer_bytes
            assert ctypes.string_at(start, run) == bytes_of(k)[page * run : (page + 1) * run]


@each_backend
def test_blocks_a_terabyte_apart_need_no_memory_between(backend: ModuleType) -> None:
    shape = Shape(torch.bfloat16, page_tokens=16, layers=2, heads=1)
    block = shape.layout.block_bytes
    rows = [0, 64 * GIB // block, 1024 * GIB // block - 1]
    with reserved(1024 * GIB) as base:
        table = [base + row * block for row in rows]
        for seed, address in enumerate(table):
            make_accessible(address, block, seed)
        check_gather(backend.gather_layer, shape, table[::-1], [2, 0, 1], 1, pool_pages=3)
        check_scatter(backend.scatter_layer, shape, (table[1], block), [table[1]], [2], 0, 3)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=shapes())
def test_reference_takes_addresses_of_any_alignment(data: st.DataObject, shape: Shape) -> None:
    """Blocks of several ranges whose distances are no whole number of blocks."""
    block = shape.layout.block_bytes
    gaps = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    starts = [sum(gaps[: i + 1]) + i * block for i in range(len(gaps))]
    size = starts[-1] + block
    pages = data.draw(st.permutations(range(len(gaps))))
    with reserved(size) as base:
        make_accessible(base, size, seed=9)
        table = data.draw(st.permutations([base + start for start in starts]))
        layer = data.draw(st.integers(0, shape.layers - 1))
        check_gather(reference.gather_layer, shape, table, pages, layer, len(pages))
        check_scatter(reference.scatter_layer, shape, (base, size), table, pages, layer, len(pages))


@each_backend
@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_buffers_that_start_inside_their_storage(backend: ModuleType, start: int) -> None:
    """A pool buffer may be a slice, at an address that is only a multiple of its item size."""
    shape = Shape(torch.float16, page_tokens=1, heads=1, k_dim=4, v_dim=8)
    size = 2 * shape.layout.block_bytes
    store = torch.zeros(64, dtype=torch.float16)
    k = store[start : start + 12].view(3, 1, 4)
    v = store[start + 12 : start + 36].view(3, 1, 8)
    with reserved(size) as base:
        make_accessible(base, size, seed=10)
        table = [base + shape.layout.block_bytes, base]
        before = bytes_of(store[: start + 36])
        expected_k, expected_v = expect_gather(
            ctypes.string_at, table, [2, 0], bytes_of(k), bytes_of(v), shape.layout, 1
        )
        backend.gather_layer(tensor(table), tensor([2, 0]), k, v, layout=shape.layout, layer=1)
    assert (bytes_of(k), bytes_of(v)) == (expected_k, expected_v)
    assert bytes_of(store[: start + 36]) == before[: 2 * start] + expected_k + expected_v
    assert not store[start + 36 :].any()


@each_backend
def test_pool_with_a_part_of_a_page_at_its_end(backend: ModuleType) -> None:
    shape = Shape(torch.bfloat16, page_tokens=16, heads=1, k_dim=5, v_dim=3)
    k, v = (buffer[:-7] for buffer in shape.pool(4, seed=11))
    with reserved(shape.layout.block_bytes) as base:
        make_accessible(base, shape.layout.block_bytes, seed=12)
        expected = expect_gather(
            ctypes.string_at, [base], [2], bytes_of(k), bytes_of(v), shape.layout, 2
        )
        backend.gather_layer(tensor([base]), tensor([2]), k, v, layout=shape.layout, layer=2)
    assert (bytes_of(k), bytes_of(v)) == expected


@each_backend
def test_a_block_may_be_gathered_to_many_pages_and_a_page_scattered_to_many_blocks(
    backend: ModuleType,
) -> None:
    shape = Shape(torch.bfloat16, page_tokens=16)
    block = shape.layout.block_bytes
    with reserved(3 * block) as base:
        make_accessible(base, 3 * block, seed=13)
        check_gather(
            backend.gather_layer, shape, [base + block] * 3, [3, 0, 2], layer=1, pool_pages=4
        )
        table = [base + 2 * block, base]
        check_scatter(
            backend.scatter_layer, shape, (base, 3 * block), table, [1, 1], 1, pool_pages=4
        )


@each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_pattern_survives(backend: ModuleType, dtype: torch.dtype) -> None:
    """NaN payloads, signalling NaNs, infinities, denormals and -0.0 are moved, not converted."""
    items = {
        1: range(256),
        2: range(65536),
        4: [0x7F800001, 0xFF800001, 0x7FC12345, 0xFFFFFFFF, 0x7FA00000, 0x80000000, 1, 0x7F800000],
    }[dtype.itemsize]
    bits = b"".join(item.to_bytes(dtype.itemsize, "little") for item in items)
    shape = Shape(dtype, page_tokens=1, layers=1, heads=1, k_dim=len(items), v_dim=len(items))
    memory = ctypes.create_string_buffer(bits + bits[::-1], 2 * len(bits))
    k, v = (torch.zeros(2, 1, len(items), dtype=dtype) for _ in "kv")
    table = tensor([ctypes.addressof(memory)])
    backend.gather_layer(table, tensor([1]), k, v, layout=shape.layout, layer=0)
    assert bytes_of(k) == bytes(len(bits)) + bits
    assert bytes_of(v) == bytes(len(bits)) + bits[::-1]
    ctypes.memset(memory, 0, 2 * len(bits))
    backend.scatter_layer(table, tensor([1]), k, v, layout=shape.layout, layer=0)
    assert memory.raw == bits + bits[::-1]


@interpreted
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_grid_moves_all_tiles(programs: int) -> None:
    # Runs longer than a tile, and more blocks than fit into one tile.
    long = Shape(torch.float32, page_tokens=64, layers=2, heads=2, k_dim=40, v_dim=24)
    short = Shape(torch.bfloat16, page_tokens=1, layers=2, heads=1, k_dim=40, v_dim=24)
    for shape, blocks in ((long, 3), (short, 150)):
        size = blocks * shape.layout.block_bytes
        pages = random.Random(14).sample(range(blocks), blocks)
        with reserved(size) as base:
            make_accessible(base, size, seed=15)
            table = [base + row * shape.layout.block_bytes for row in range(blocks)]
            gather = partial(triton_kernels.gather_layer, programs=programs)
            scatter = partial(triton_kernels.scatter_layer, programs=programs)
            check_gather(gather, shape, table, pages, 1, blocks)
            check_scatter(scatter, shape, (base, size), table, pages, 1, blocks)


@interpreted
@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=shapes())
def test_kernels_agree_with_the_reference(data: st.DataObject, shape: Shape) -> None:
    blocks = data.draw(st.integers(1, 12))
    pages = tensor(data.draw(st.permutations(range(blocks))))
    layer = data.draw(st.integers(0, shape.layers - 1))
    size = blocks * shape.layout.block_bytes
    with reserved(2 * size) as base:
        make_accessible(base, 2 * size, seed=16)
        table = tensor([base + row * shape.layout.block_bytes for row in range(blocks)])
        pools = [shape.pool(blocks, seed=17) for _ in range(2)]
        for backend, (k, v) in zip((reference, triton_kernels), pools, strict=True):
            backend.gather_layer(table, pages, k, v, layout=shape.layout, layer=layer)
        for ours, kernels in zip(*pools, strict=True):
            assert bytes_of(ours) == bytes_of(kernels)

        ctypes.memmove(base + size, base, size)
        k, v = shape.pool(blocks, seed=18)
        reference.scatter_layer(table, pages, k, v, layout=shape.layout, layer=layer)
        triton_kernels.scatter_layer(table + size, pages, k, v, layout=shape.layout, layer=layer)
        assert ctypes.string_at(base, size) == ctypes.string_at(base + size, size)


def test_public_calls_copy_on_the_cpu() -> None:
    shape = Shape(torch.bfloat16, page_tokens=16)
    size = 4 * shape.layout.block_bytes
    with reserved(size) as base:
        make_accessible(base, size, seed=19)
        table = [base + 3 * shape.layout.block_bytes, base]
        check_gather(gather_layer, shape, table, [1, 2], layer=2, pool_pages=3)
        check_scatter(scatter_layer, shape, (base, size), table, [1, 2], layer=2, pool_pages=3)
