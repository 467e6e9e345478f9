"""Host extents for a receiver on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from cuda.bindings import driver as cu

from support.fake_cuda import FakeDriver
from support.raw_memory import PAGE, peek, poke
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Extent, HostArena, pinned
from swiftcache_tier.extents.pinned import PinnedHostAddressRange

SIZE = 4 * PAGE


@pytest.fixture
def addresses(driver: FakeDriver) -> Iterator[PinnedHostAddressRange]:
    addresses = PinnedHostAddressRange(4 * SIZE, ordinal=0)
    yield addresses
    addresses.close()


@pytest.fixture
def extent() -> Iterator[Extent]:
    extent = HostArena().create(SIZE)
    yield extent
    extent.close()


def map_extent(addresses: PinnedHostAddressRange, offset: int, extent: Extent) -> None:
    descriptor = extent.share()
    try:
        addresses.map(offset, descriptor, SIZE)
    finally:
        os.close(descriptor)


def test_memory_is_locked_while_it_is_mapped(
    driver: FakeDriver, addresses: PinnedHostAddressRange, extent: Extent
) -> None:
    map_extent(addresses, SIZE, extent)
    address = addresses.base + SIZE
    assert driver.registered == {address: SIZE}
    poke(address, b"data")
    assert peek(address, 4) == b"data"
    addresses.unmap(SIZE, SIZE)
    assert not driver.registered
    map_extent(addresses, SIZE, extent)
    assert driver.registered == {address: SIZE}


def test_only_what_is_mapped_can_be_unmapped(
    driver: FakeDriver, addresses: PinnedHostAddressRange, extent: Extent
) -> None:
    map_extent(addresses, 0, extent)
    for offset, size_bytes in ((0, 2 * SIZE), (SIZE, SIZE)):
        with pytest.raises(ValueError, match="no extent"):
            addresses.unmap(offset, size_bytes)
    assert driver.registered == {addresses.base: SIZE}


def test_what_cannot_be_locked_is_not_mapped(
    driver: FakeDriver, addresses: PinnedHostAddressRange, extent: Extent
) -> None:
    with (
        driver.fail("cuMemHostRegister", cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(OSError, match="cuMemHostRegister"),
    ):
        map_extent(addresses, 0, extent)
    assert addresses.mapped_bytes == 0
    map_extent(addresses, 0, extent)


def test_another_address_on_the_gpu_is_refused(
    driver: FakeDriver, addresses: PinnedHostAddressRange, extent: Extent
) -> None:
    driver.device_pointer_shift = PAGE
    with pytest.raises(SwiftCacheError, match="one address for both"):
        map_extent(addresses, 0, extent)
    assert not driver.registered
    assert addresses.mapped_bytes == 0


def test_memory_is_placed_before_it_is_locked(
    driver: FakeDriver, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed: list[tuple[int, int, int]] = []

    def prefer(address: int, size_bytes: int, node: int) -> None:
        assert not driver.registered, "locked pages do not move any more"
        placed.append((address, size_bytes, node))

    monkeypatch.setattr(pinned, "prefer_numa_node", prefer)
    addresses = PinnedHostAddressRange(4 * SIZE, ordinal=0, numa_node=1)
    map_extent(addresses, SIZE, extent)
    assert placed == [(addresses.base + SIZE, SIZE, 1)]
    addresses.close()


def test_memory_that_cannot_be_placed_is_used_all_the_same(
    driver: FakeDriver, extent: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(address: int, size_bytes: int, node: int) -> None:
        asked.append(node)
        raise PermissionError("mbind: not here")

    monkeypatch.setattr(pinned, "prefer_numa_node", refuse)
    addresses = PinnedHostAddressRange(4 * SIZE, ordinal=0, numa_node=1)
    for slot in range(2):
        map_extent(addresses, slot * SIZE, extent)
    assert len(driver.registered) == 2
    assert asked == [1], "what is forbidden once stays so"
    addresses.close()


def test_closing_unlocks_everything(driver: FakeDriver, extent: Extent) -> None:
    addresses = PinnedHostAddressRange(4 * SIZE, ordinal=0)
    for offset in (0, 2 * SIZE):
        map_extent(addresses, offset, extent)
    addresses.close()
    addresses.close()
    assert not driver.registered
    assert driver.contexts == [0, 0]


def test_a_device_that_is_not_there(driver: FakeDriver) -> None:
    with pytest.raises(SwiftCacheError, match="cuda:5"):
        PinnedHostAddressRange(4 * SIZE, ordinal=5)
    with pytest.raises(ValueError, match="multiple"):
        PinnedHostAddressRange(SIZE + 1, ordinal=0)
    assert driver.contexts == [0, 0]
