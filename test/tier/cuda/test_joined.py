"""Two address ranges under one base."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
from cuda.bindings import driver as cu
from hypothesis import given
from hypothesis import strategies as st

from support.fake_cuda import FakeDriver
from support.raw_memory import PAGE, peek, poke
from swiftcache_tier.blocks import DonorGeometry
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import (
    AddressRange,
    HostAddressRange,
    HostArena,
    JoinedAddressRange,
    MapRequest,
    address_range_for,
)
from swiftcache_tier.extents.cuda import CudaArena

GRANULARITY = 4 * PAGE
SIZE = 16 * PAGE


@pytest.fixture
def joined() -> Iterator[JoinedAddressRange]:
    ranges = [HostAddressRange(4 * SIZE) for _ in range(3)]
    lowest, between, highest = sorted(ranges, key=lambda addresses: addresses.base)
    parts = {"host": highest, "cuda": lowest}
    joined = JoinedAddressRange(parts, GRANULARITY)
    yield joined
    joined.close()
    between.close()


def test_an_extent_is_found_in_either_part(joined: JoinedAddressRange) -> None:
    extent = HostArena().create(SIZE)
    descriptor = extent.share()
    for name in ("host", "cuda"):
        offset = joined.window(name).start_bytes + SIZE
        joined.map(offset, descriptor, SIZE)
        poke(joined.base + offset, name.encode())
    assert peek(joined.base + joined.window("host").start_bytes + SIZE, 4) == b"cuda"
    for name in ("host", "cuda"):
        joined.unmap(joined.window(name).start_bytes + SIZE, SIZE)
    os.close(descriptor)
    extent.close()


def test_several_extents_go_into_the_part_where_the_first_lies(joined: JoinedAddressRange) -> None:
    extent = HostArena().create(SIZE)
    descriptor = extent.share()
    for name in ("host", "cuda"):
        start = joined.window(name).start_bytes
        asked = [MapRequest(start + place * SIZE, descriptor, SIZE) for place in (2, 0)]
        assert joined.map_each(iter(asked)) == (2, None)
        poke(joined.base + start, name.encode())
        assert peek(joined.base + start + 2 * SIZE, 4) == name.encode()[:4]
    mapped, problem = joined.map_each(
        [MapRequest(start + SIZE, descriptor, SIZE), MapRequest(start + 3 * SIZE, 0, SIZE)]
    )
    assert mapped == 1
    assert "descriptor 0 is no host extent" in str(problem)
    assert joined.map_each([]) == (0, None)
    with pytest.raises(ValueError, match="none of its parts"):
        joined.map_each([MapRequest(-PAGE, descriptor, SIZE)])
    os.close(descriptor)
    extent.close()


def test_offsets_outside_the_parts_belong_to_nobody(joined: JoinedAddressRange) -> None:
    first, second = sorted(joined.window(name) for name in ("host", "cuda"))
    assert first.end_bytes < second.start_bytes
    for offset in (first.end_bytes, second.start_bytes - PAGE, second.end_bytes, -PAGE):
        with pytest.raises(ValueError, match="none of its parts"):
            joined.map(offset, 0, PAGE)
        with pytest.raises(ValueError, match="none of its parts"):
            joined.unmap(offset, PAGE)
    with pytest.raises(ValueError, match="'disk'"):
        joined.window("disk")


def test_what_a_receiver_on_a_gpu_can_be_lent(driver: FakeDriver) -> None:
    addresses = address_range_for("cuda:0", 64 << 20)
    assert addresses.names == ["host", "cuda"]
    size_bytes = addresses.granularity_bytes
    arenas = {"host": HostArena(), "cuda": CudaArena(1, context_idle_s=None)}
    extents = {name: arena.create(size_bytes) for name, arena in arenas.items()}
    for name, extent in extents.items():
        start = addresses.window(name).start_bytes
        offset = -(-start // size_bytes) * size_bytes
        descriptor = extent.share()
        addresses.map(offset, descriptor, size_bytes)
        os.close(descriptor)
        address = addresses.base + offset
        assert (address in driver.mappings) == (name == "cuda")
        assert (address in driver.registered) == (name == "host")
        extent.close()
    addresses.close()
    assert not driver.registered
    assert not driver.reservations


def test_what_a_receiver_on_a_cpu_can_be_lent() -> None:
    addresses = address_range_for("cpu", 16 * PAGE)
    assert addresses.names == ["host"]
    assert addresses.window("host") == (0, 16 * PAGE, PAGE)
    with pytest.raises(ValueError, match="'cuda'"):
        addresses.window("cuda")
    addresses.close()


def test_receivers_that_cannot_be(driver: FakeDriver) -> None:
    for device in ("cuda", "cuda:x", "tpu:0", "cuda:9"):
        with pytest.raises(SwiftCacheError, match=device):
            address_range_for(device, 64 << 20)
    with (
        driver.fail("cuMemAddressReserve", cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(SwiftCacheError, match="cannot reserve"),
    ):
        address_range_for("cuda:0", 64 << 20)
    assert driver.contexts == [0, 0]


class Reserved(AddressRange):
    """A range that only has a place."""

    granularity_bytes = PAGE

    def __init__(self, base: int, size_bytes: int) -> None:
        self.base, self.size_bytes = base, size_bytes

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        raise NotImplementedError

    def unmap(self, offset: int, size_bytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@given(
    host_page=st.integers(1, 2**30),
    cuda_granule=st.integers(1, 2**24),
    block_bytes=st.integers(1, 40).map(lambda n: n * 24 * 1024),
)
def test_blocks_and_extents_are_aligned_in_every_part(
    host_page: int, cuda_granule: int, block_bytes: int
) -> None:
    parts = {
        "host": Reserved(host_page * PAGE, 1 << 40),
        "cuda": Reserved(cuda_granule * GRANULARITY, 1 << 40),
    }
    joined = JoinedAddressRange(parts, GRANULARITY)
    step = math.lcm(block_bytes, GRANULARITY)
    for name, part in parts.items():
        start, end, _ = joined.window(name)
        offset = -(-start // step) * step
        geometry = DonorGeometry(block_bytes, 32 * GRANULARITY, 2, offset)
        address = joined.base + geometry.first_block * block_bytes
        assert address == joined.base + offset
        assert part.base <= address < part.base + part.size_bytes
        assert (address - part.base) % (GRANULARITY if name == "cuda" else PAGE) == 0
        assert joined.base + end == part.base + part.size_bytes
