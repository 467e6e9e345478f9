"""A batch moved layer by layer, by each of its ways, checked byte by byte on host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.cases import (
    Shape,
    bytes_of,
    expect_gather,
    expect_scatter,
    make_accessible,
    reserved,
    shapes,
)
from kernel.host_engine import HostCopyEngine

from swiftcache_kernel import (
    COPY_ENGINE,
    BlockLayout,
    LayerTransfer,
    PoolBuffers,
    find_runs,
    layer_transfer,
)
from swiftcache_kernel.copy_engine import CopyTransfer
from swiftcache_kernel.kernel_transfer import KernelTransfer

# NumPy 2 deprecates what Triton 3.6's interpreter does at each loop bound.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled here, see test_layer_transfer_gpu"
)

Make = Callable[[torch.Tensor, torch.Tensor, PoolBuffers], LayerTransfer]


def by_kernel(table: torch.Tensor, pages: torch.Tensor, pool: PoolBuffers) -> LayerTransfer:
    return KernelTransfer(table, pages, pool, programs=3)


def by_copies(table: torch.Tensor, pages: torch.Tensor, pool: PoolBuffers) -> CopyTransfer:
    runs = find_runs(table.numpy(), pages.numpy(), pool.layout.block_bytes)
    return CopyTransfer(table, pages, pool, runs, HostCopyEngine())


each_way = pytest.mark.parametrize(
    "make",
    [
        pytest.param(layer_transfer, id="reference"),
        pytest.param(by_kernel, id="triton", marks=interpreted),
        pytest.param(by_copies, id="copy-engine"),
    ],
)


def pool_of(shape: Shape, pages: int, seed: int) -> PoolBuffers:
    """A pool of random bits in every layer."""
    buffers = [shape.pool(pages, seed=100 * seed + layer) for layer in range(shape.layers)]
    return PoolBuffers(shape.layout, [k for k, _ in buffers], [v for _, v in buffers])


def contents(pool: PoolBuffers) -> list[tuple[bytes, bytes]]:
    return [(bytes_of(k), bytes_of(v)) for k, v in zip(pool.k, pool.v, strict=True)]


def tensor(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@contextmanager
def donor(shape: Shape, blocks: int, seed: int) -> Iterator[tuple[int, int]]:
    """Address and size of so many blocks of random bits."""
    size = blocks * shape.layout.block_bytes
    with reserved(size) as base:
        make_accessible(base, size, seed)
        yield base, size


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Block and page numbers: stretches of neighbours, long and short, in any order."""
    pieces = []
    start = 0
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)):
        pieces.append(range(start, start + length))
        start += length + draw(st.integers(0, 1))
    blocks = [number for piece in draw(st.permutations(pieces)) for number in piece]
    pages = [number for piece in draw(st.permutations(pieces)) for number in piece]
    return blocks, pages


@each_way
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), batch=batches())
def test_each_layer_both_ways(make: Make, shape: Shape, batch: tuple[list[int], list[int]]) -> None:
    numbers, pages = batch
    room = max(*numbers, *pages) + 2
    with donor(shape, room, seed=1) as (base, size):
        table = [base + number * shape.layout.block_bytes for number in numbers]
        pool = pool_of(shape, room, seed=2)
        transfer = make(tensor(table), tensor(pages), pool)
        for layer in reversed(range(shape.layers)):
            expected = contents(pool)
            expected[layer] = expect_gather(
                ctypes.string_at, table, pages, *expected[layer], shape.layout, layer
            )
            transfer.gather(layer)
            assert contents(pool) == expected

        other = pool_of(shape, room, seed=3)
        back = make(tensor(table), tensor(pages), other)
        for layer in range(shape.layers):
            memory = ctypes.string_at(base, size)
            expected_memory = expect_scatter(
                memory, base, table, pages, *contents(other)[layer], shape.layout, layer
            )
            back.scatter(layer)
            assert ctypes.string_at(base, size) == expected_memory


@each_way
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), batch=batches())
def test_all_layers_at_once(make: Make, shape: Shape, batch: tuple[list[int], list[int]]) -> None:
    numbers, pages = batch
    room = max(*numbers, *pages) + 2
    with donor(shape, room, seed=4) as (base, size):
        table = [base + number * shape.layout.block_bytes for number in numbers]
        pool = pool_of(shape, room, seed=5)
        before = contents(pool)
        expected = ctypes.string_at(base, size)
        for layer, (k, v) in enumerate(before):
            expected = expect_scatter(expected, base, table, pages, k, v, shape.layout, layer)
        make(tensor(table), tensor(pages), pool).scatter_all()
        assert ctypes.string_at(base, size) == expected
        assert contents(pool) == before


@each_way
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), batch=batches(), data=st.data())
def test_some_layers_at_once(
    make: Make, shape: Shape, batch: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    numbers, pages = batch
    room = max(*numbers, *pages) + 2
    first = data.draw(st.integers(0, shape.layers - 1))
    layers = data.draw(st.integers(1, shape.layers - first))
    with donor(shape, room, seed=13) as (base, _):
        table = [base + number * shape.layout.block_bytes for number in numbers]
        pool = pool_of(shape, room, seed=14)
        expected = contents(pool)
        for layer in range(first, first + layers):
            expected[layer] = expect_gather(
                ctypes.string_at, table, pages, *expected[layer], shape.layout, layer
            )
        make(tensor(table), tensor(pages), pool).gather_layers(first, layers)
        assert contents(pool) == expected


@interpreted
@pytest.mark.parametrize("programs", [1, 5, 16, 17, 1000])
def test_any_grid_moves_all_tiles(programs: int) -> None:
    # Runs longer than a tile, and more blocks than fit into one tile.
    long = Shape(torch.float32, page_tokens=64, layers=2, heads=2, k_dim=40, v_dim=24)
    short = Shape(torch.bfloat16, page_tokens=1, layers=3, heads=1, k_dim=40, v_dim=24)
    for shape, blocks in ((long, 3), (short, 150)):
        with donor(shape, blocks, seed=6) as (base, size):
            pool = pool_of(shape, blocks, seed=7)
            table = [base + row * shape.layout.block_bytes for row in range(blocks)]
            pages = list(range(blocks))[::-1]
            transfer = KernelTransfer(tensor(table), tensor(pages), pool, programs)
            transfer.gather(1)
            expected = expect_gather(
                ctypes.string_at, table, pages, *contents(pool)[1], shape.layout, 1
            )
            assert contents(pool)[1] == expected
            transfer.gather_layers(0, shape.layers)
            for layer, found in enumerate(contents(pool)):
                memory_of_layer = ctypes.string_at, table, pages, *found, shape.layout, layer
                assert found == expect_gather(*memory_of_layer)
            memory = ctypes.string_at(base, size)
            for layer, (k, v) in enumerate(contents(pool)):
                memory = expect_scatter(memory, base, table, pages, k, v, shape.layout, layer)
            transfer.scatter_all()
            assert ctypes.string_at(base, size) == memory


SHAPE = Shape(torch.bfloat16, page_tokens=16, layers=3, heads=2, k_dim=64, v_dim=32)


def test_long_runs_are_strided_copies_and_short_ones_a_batch() -> None:
    block_bytes = SHAPE.layout.block_bytes
    with donor(SHAPE, 16, seed=8) as (base, _):
        pool = pool_of(SHAPE, 16, seed=9)
        table = base + np.arange(16, dtype=np.int64) * block_bytes
        for pages, strided_copies, batches in (
            (np.arange(16), 2, 0),
            (np.roll(np.arange(16), 8), 4, 0),
            (np.arange(16)[::-1].copy(), 0, 1),
        ):
            engine = HostCopyEngine()
            runs = find_runs(table, pages, block_bytes)
            transfer = CopyTransfer(
                torch.from_numpy(table), torch.from_numpy(pages), pool, runs, engine
            )
            transfer.gather(1)
            assert (engine.strided_copies, engine.batches) == (strided_copies, batches)


@each_way
@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there_is_refused(make: Make, layer: int) -> None:
    with donor(SHAPE, 1, seed=10) as (base, _):
        transfer = make(tensor([base]), tensor([0]), pool_of(SHAPE, 1, seed=11))
        for move in (transfer.gather, transfer.scatter):
            with pytest.raises(ValueError, match=f"^layer is {layer}; expected 0 to 2$"):
                move(layer)
        with pytest.raises(ValueError, match=f"^layer is {layer}; expected 0 to 2$"):
            transfer.gather_layers(min(layer, 1), layer if layer > 0 else 1)


@each_way
def test_no_blocks_move_nothing(make: Make) -> None:
    pool = pool_of(SHAPE, 2, seed=12)
    before = contents(pool)
    transfer = make(tensor([]), tensor([]), pool)
    transfer.gather(0)
    transfer.scatter(2)
    transfer.scatter_all()
    assert contents(pool) == before


@each_way
def test_a_batch_that_is_none_is_refused(make: Make) -> None:
    pool = pool_of(SHAPE, 2, seed=13)
    with pytest.raises(ValueError, match=r"1 (blocks|addresses), (pages has 2|2 pages)"):
        make(tensor([0]), tensor([0, 1]), pool)


@pytest.mark.parametrize("page", [-1, 2])
def test_pages_outside_the_pool_are_refused_where_the_host_sees_them(page: int) -> None:
    pool = pool_of(SHAPE, 2, seed=14)
    with donor(SHAPE, 1, seed=15) as (base, _):
        message = f"^pages run from {page} to {page}; expected 0 to 1$"
        with pytest.raises(ValueError, match=message):
            by_copies(tensor([base]), tensor([page]), pool)
        transfer = layer_transfer(tensor([base]), tensor([page]), pool)
        with pytest.raises(ValueError, match=message):
            transfer.gather(0)


def test_runs_of_another_batch_are_refused() -> None:
    runs = find_runs(np.zeros(2, dtype=np.int64), np.arange(2), SHAPE.layout.block_bytes)
    with pytest.raises(ValueError, match="table has 1 blocks, runs have 2"):
        CopyTransfer(tensor([0]), tensor([0]), pool_of(SHAPE, 2, seed=16), runs, HostCopyEngine())


def test_on_the_cpu_any_path_will_do() -> None:
    with donor(SHAPE, 1, seed=17) as (base, _):
        pool = pool_of(SHAPE, 2, seed=18)
        expected = expect_gather(ctypes.string_at, [base], [1], *contents(pool)[2], SHAPE.layout, 2)
        layer_transfer(tensor([base]), tensor([1]), pool, path=COPY_ENGINE).gather(2)
        assert contents(pool)[2] == expected


K, V = SHAPE.pool(4, seed=19)
POOLS = [
    ([K, K], [V, V], "k has 2 layers, v has 2; the layout expects 3"),
    ([K] * 3, [V] * 2, "k has 3 layers, v has 2; the layout expects 3"),
    ([K, K[:16], K], [V, V, V], "layer 1: k has 16 slots, v has 64"),
    ([K, K[:16], K], [V, V[:16], V], "layer 1 has 16 slots on cpu, layer 0 has 64 on cpu"),
    ([K, K, V], [V, V, V], "layer 2: k has 128 bytes per token; the layout expects 256"),
    ([K.to("meta")] * 3, [V.to("meta")] * 3, "k is on device type 'meta'; expected"),
]


@pytest.mark.parametrize(("k", "v", "message"), POOLS, ids=[message for *_, message in POOLS])
def test_what_is_no_pool_is_refused(
    k: list[torch.Tensor], v: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        PoolBuffers(SHAPE.layout, k, v)
    assert "\n" not in str(error.value)


def test_a_pool_knows_the_alignment_of_all_its_layers() -> None:
    store = torch.zeros(1024, dtype=torch.int16)
    layout = BlockLayout(layers=2, page_tokens=1, k_token_bytes=32, v_token_bytes=32)
    first, apart = (store[start : start + 64].view(4, 1, 16) for start in (0, 64))
    odd = store[130:194].view(4, 1, 16)
    assert store.data_ptr() % 16 == 0
    assert PoolBuffers(layout, [first, apart], [first, apart]).alignment_bytes == 16
    assert PoolBuffers(layout, [first, apart], [first, odd]).alignment_bytes == 4
