"""Checksums of blocks and pages, against the definition written out in Python integers.

Every test runs on what a CPU build uses and, where there is no GPU, on the Triton kernels under
their interpreter.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.cases import Shape, all_shapes, bytes_of, make_accessible, reserved, shapes

from swiftcache_kernel import (
    BlockLayout,
    PoolBuffers,
    block_checksums,
    layer_transfer,
    page_checksums,
    triton_checksum,
)

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled here, see test_checksum_gpu"
)
each_blocks_backend = pytest.mark.parametrize(
    "of_blocks",
    [
        pytest.param(block_checksums, id="cpu"),
        pytest.param(triton_checksum.block_checksums, id="triton", marks=interpreted),
    ],
)
each_pages_backend = pytest.mark.parametrize(
    "of_pages",
    [
        pytest.param(page_checksums, id="cpu"),
        pytest.param(triton_checksum.page_checksums, id="triton", marks=interpreted),
    ],
)

OfBlocks = Callable[..., torch.Tensor]
OfPages = Callable[..., torch.Tensor]


def expected(block: bytes, layout: BlockLayout) -> int:
    width = math.gcd(8, layout.k_bytes, layout.v_bytes)
    total = 0
    for place in range(len(block) // width):
        word = int.from_bytes(block[place * width : (place + 1) * width], "little")
        total += mixed(word, place)
    return int.from_bytes((total % (1 << 64)).to_bytes(8, "little"), "little", signed=True)


def mixed(word: int, place: int) -> int:
    value = word ^ ((place + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return value ^ (value >> 31)


def random_pool(shape: Shape, pages: int, seed: int = 0) -> PoolBuffers:
    buffers = [shape.pool(pages, seed=100 * seed + layer) for layer in range(shape.layers)]
    k, v = zip(*buffers, strict=True)
    return PoolBuffers(shape.layout, k, v)


def page_bytes(pool: PoolBuffers, page: int) -> bytes:
    """The page as a block: for each layer its K, then its V."""
    parts = []
    for k, v in zip(pool.k, pool.v, strict=True):
        for buffer, run in ((k, pool.layout.k_bytes), (v, pool.layout.v_bytes)):
            parts.append(bytes_of(buffer)[page * run : (page + 1) * run])
    return b"".join(parts)


def numbers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


SMALL = Shape(torch.bfloat16, page_tokens=2, layers=2, heads=1, k_dim=8, v_dim=12)


@each_blocks_backend
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), rows=st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_blocks_by_definition(of_blocks: OfBlocks, shape: Shape, rows: list[int]) -> None:
    size = shape.layout.block_bytes
    with reserved(4 * size) as base:
        make_accessible(base, 4 * size, seed=1)
        sums = of_blocks(numbers([base + row * size for row in rows]), shape.layout)
        blocks = [ctypes.string_at(base + row * size, size) for row in rows]
    assert sums.dtype == torch.int64
    assert sums.tolist() == [expected(block, shape.layout) for block in blocks]


@each_pages_backend
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), pages=st.lists(st.integers(0, 3), min_size=1, max_size=3))
def test_pages_by_definition(of_pages: OfPages, shape: Shape, pages: list[int]) -> None:
    pool = random_pool(shape, pages=4)
    sums = of_pages(numbers(pages), pool)
    assert sums.dtype == torch.int64
    assert sums.tolist() == [expected(page_bytes(pool, page), shape.layout) for page in pages]


@each_pages_backend
@each_blocks_backend
@pytest.mark.parametrize("shape", all_shapes(), ids=str)
def test_a_block_has_the_checksum_of_the_page_it_was_stored_from(
    of_blocks: OfBlocks, of_pages: OfPages, shape: Shape
) -> None:
    pool = random_pool(shape, pages=5)
    pages = numbers([4, 0, 3])
    with reserved(3 * shape.layout.block_bytes) as base:
        make_accessible(base, 3 * shape.layout.block_bytes, seed=2)
        table = base + numbers([2, 0, 1]) * shape.layout.block_bytes
        layer_transfer(table, pages, pool).scatter_all()
        sums = of_blocks(table, shape.layout).tolist()
    assert sums == of_pages(pages, pool).tolist()
    assert len(set(sums)) == 3


@each_blocks_backend
@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes())
def test_any_flipped_bit_changes_the_checksum(
    of_blocks: OfBlocks, data: st.DataObject, shape: Shape
) -> None:
    size = shape.layout.block_bytes
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    with reserved(size) as base:
        make_accessible(base, size, seed=3)
        before = of_blocks(numbers([base]), shape.layout).item()
        memory = (ctypes.c_ubyte * size).from_address(base)
        memory[at] ^= 1 << bit
        assert of_blocks(numbers([base]), shape.layout).item() != before
        memory[at] ^= 1 << bit
        assert of_blocks(numbers([base]), shape.layout).item() == before


@each_blocks_backend
@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=shapes())
def test_words_that_change_places_change_the_checksum(
    of_blocks: OfBlocks, data: st.DataObject, shape: Shape
) -> None:
    size = shape.layout.block_bytes
    places = st.integers(0, size - 1)
    one, other = data.draw(st.tuples(places, places))
    with reserved(size) as base:
        make_accessible(base, size, seed=4)
        memory = (ctypes.c_ubyte * size).from_address(base)
        differ = memory[one] != memory[other]
        before = of_blocks(numbers([base]), shape.layout).item()
        memory[one], memory[other] = memory[other], memory[one]
        assert (of_blocks(numbers([base]), shape.layout).item() != before) == differ


@each_pages_backend
def test_layers_k_and_v_that_change_places_change_the_checksum(of_pages: OfPages) -> None:
    shape = Shape(torch.bfloat16, page_tokens=2, layers=3)
    pool = random_pool(shape, pages=2)
    page = numbers([1])
    layer_swapped = PoolBuffers(shape.layout, [pool.k[i] for i in (1, 0, 2)], pool.v)
    sides_swapped = PoolBuffers(shape.layout, pool.v, pool.k)
    sums = {of_pages(page, p).item() for p in (pool, layer_swapped, sides_swapped)}
    assert len(sums) == 3


@each_blocks_backend
def test_ranges_with_unmapped_holes_between(of_blocks: OfBlocks) -> None:
    layout = BlockLayout(layers=3, page_tokens=16, k_token_bytes=128, v_token_bytes=128)
    rows = [80_000_000, 1, 5_000_000]
    with reserved(1 << 40) as base:
        for row in rows:
            make_accessible(base + row * layout.block_bytes, layout.block_bytes, seed=row)
        table = base + numbers(rows) * layout.block_bytes
        sums = of_blocks(table, layout).tolist()
        blocks = [ctypes.string_at(address, layout.block_bytes) for address in table.tolist()]
    assert sums == [expected(block, layout) for block in blocks]


@interpreted
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_grid_adds_all_tiles(programs: int) -> None:
    # Runs of several tiles, the last of them not full.
    shape = Shape(torch.bfloat16, page_tokens=16, layers=2, heads=5, k_dim=128, v_dim=96)
    pool = random_pool(shape, pages=3)
    pages = numbers([2, 0])
    with reserved(2 * shape.layout.block_bytes) as base:
        make_accessible(base, 2 * shape.layout.block_bytes, seed=5)
        table = base + numbers([0, 1]) * shape.layout.block_bytes
        layer_transfer(table, pages, pool).scatter_all()
        in_memory = triton_checksum.block_checksums(table, shape.layout, programs=programs)
        assert in_memory.tolist() == block_checksums(table, shape.layout).tolist()
    in_pool = triton_checksum.page_checksums(pages, pool, programs=programs)
    assert in_pool.tolist() == in_memory.tolist()


def test_on_the_cpu_addresses_may_have_any_alignment() -> None:
    size = SMALL.layout.block_bytes
    with reserved(4096) as base:
        make_accessible(base, 4096, seed=6)
        addresses = [base + 1, base + 1003]
        sums = block_checksums(numbers(addresses), SMALL.layout)
        blocks = [ctypes.string_at(address, size) for address in addresses]
    assert sums.tolist() == [expected(block, SMALL.layout) for block in blocks]


def misaligned_pool() -> PoolBuffers:
    """Buffers that begin in the middle of a word."""
    k, v = (torch.zeros(1 + 4 * 2 * dim, dtype=torch.bfloat16) for dim in (8, 12))
    views = k[1:].view(8, 1, 8), v[1:].view(8, 1, 12)
    return PoolBuffers(BlockLayout(1, 2, 16, 24), [views[0]], [views[1]])


def test_on_the_cpu_buffers_may_have_any_alignment() -> None:
    pool = misaligned_pool()
    [checksum] = page_checksums(numbers([3]), pool).tolist()
    assert checksum == expected(page_bytes(pool, 3), pool.layout)


@interpreted
def test_a_gpu_needs_aligned_buffers() -> None:
    with pytest.raises(ValueError, match="is aligned to 2 bytes; expected 8"):
        triton_checksum.page_checksums(numbers([3]), misaligned_pool())


NUMBERS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (NUMBERS.to(torch.int32), "table is contiguous int32 [2]; expected contiguous int64 [n]"),
        (NUMBERS.view(1, 2), "table is contiguous int64 [1, 2]; expected contiguous int64 [n]"),
        (NUMBERS.to("meta"), "k is on device type 'meta'; expected 'cpu' or 'cuda'"),
    ],
)
def test_broken_tables(table: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_checksums(table, SMALL.layout)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (NUMBERS.to(torch.int32), "pages is contiguous int32 [2]; expected contiguous int64 [n]"),
        (NUMBERS.to("meta"), "pages is on meta, the pool on cpu; expected one device"),
        (NUMBERS + 4, "pages run from 4 to 4; expected 0 to 3"),
        (NUMBERS - 1, "pages run from -1 to -1; expected 0 to 3"),
    ],
)
def test_broken_pages(pages: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        page_checksums(pages, random_pool(SMALL, pages=4))


@each_pages_backend
@each_blocks_backend
def test_nothing_has_no_checksums(of_blocks: OfBlocks, of_pages: OfPages) -> None:
    for sums in (
        of_blocks(NUMBERS[:0], SMALL.layout),
        of_pages(NUMBERS[:0], random_pool(SMALL, pages=1)),
    ):
        assert sums.dtype == torch.int64
        assert len(sums) == 0
