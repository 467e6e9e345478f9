"""GPU extents as the donor holds them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from cuda.bindings import driver as cu

from support.fake_cuda import GRANULARITY, FakeDriver
from support.processes import wait_until
from support.raw_memory import no_descriptor_leaks
from swiftcache_tier.cuda_driver import device_count, ordinal_of
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Extent, arena_for
from swiftcache_tier.extents.cuda import SPARE_BYTES, CudaArena
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
from swiftcache_tier.extents.pool_memory import PoolMemory

OUT_OF_MEMORY = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
UNKNOWN = cu.CUresult.CUDA_ERROR_UNKNOWN
ZEROS = bytes(GRANULARITY)


@pytest.fixture
def arena(driver: FakeDriver) -> CudaArena:
    return CudaArena(1, context_idle_s=None)


@pytest.fixture
def addresses(driver: FakeDriver) -> Iterator[CudaAddressRange]:
    addresses = CudaAddressRange(4 * GRANULARITY, ordinal=0)
    yield addresses
    addresses.close()


def map_extent(addresses: CudaAddressRange, offset: int, extent: Extent) -> int:
    descriptor = extent.share()
    try:
        addresses.map(offset, descriptor, extent.size_bytes)
    finally:
        os.close(descriptor)
    return addresses.base + offset


def test_a_new_extent_lies_on_its_device_and_reads_as_zeros(
    driver: FakeDriver, arena: CudaArena, addresses: CudaAddressRange
) -> None:
    extent = arena.create(GRANULARITY)
    assert driver.used_bytes(1) == GRANULARITY
    assert driver.used_bytes(0) == 0
    assert driver.read(map_extent(addresses, 0, extent), GRANULARITY) == ZEROS


def test_descriptors_are_not_inherited(driver: FakeDriver, arena: CudaArena) -> None:
    extent = arena.create(GRANULARITY)
    with no_descriptor_leaks():
        one, other = extent.share(), extent.share()
        assert one != other
        for descriptor in (one, other):
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)


def test_a_pool_has_an_extent_exported_once(driver: FakeDriver) -> None:
    with no_descriptor_leaks():
        memory = PoolMemory("cuda:1", GRANULARITY, 2)
        driver.calls.clear()
        descriptors = [memory.share(1) for _ in range(3)]
        assert driver.calls["cuMemExportToShareableHandle"] == 1
        addresses = CudaAddressRange(GRANULARITY, ordinal=0)
        for descriptor in descriptors:
            addresses.map(0, descriptor, GRANULARITY)
            driver.write(addresses.base, b"theirs")
            assert driver.read(memory.base + GRANULARITY, 6, ordinal=1) == b"theirs"
            addresses.unmap(0, GRANULARITY)
            os.close(descriptor)
        addresses.close()
        memory.close()
    assert driver.used_bytes(1) == 0


def test_memory_stays_until_the_last_holder_lets_go(
    driver: FakeDriver, arena: CudaArena, addresses: CudaAddressRange
) -> None:
    extent = arena.create(GRANULARITY)
    address = map_extent(addresses, 0, extent)
    driver.write(address, b"kept")
    extent.close()
    extent.close()
    assert driver.read(address, 4) == b"kept"
    addresses.unmap(0, GRANULARITY)
    assert driver.used_bytes(1) == 0
    with pytest.raises(ValueError, match="closed"):
        extent.share()


def test_scrubbed_memory_is_out_of_reach_of_its_last_holder(
    driver: FakeDriver, arena: CudaArena, addresses: CudaAddressRange
) -> None:
    extent = arena.create(GRANULARITY)
    stale_address = map_extent(addresses, 0, extent)
    stale_descriptor = extent.share()
    driver.write(stale_address, b"old")
    extent.scrub()
    address = map_extent(addresses, GRANULARITY, extent)
    assert driver.read(address, GRANULARITY) == ZEROS
    driver.write(address, b"new")
    assert driver.read(stale_address, 3) == b"old"
    addresses.map(2 * GRANULARITY, stale_descriptor, GRANULARITY)
    assert driver.read(addresses.base + 2 * GRANULARITY, 3) == b"old"
    os.close(stale_descriptor)


def test_scrubbing_leaves_no_second_copy(driver: FakeDriver, arena: CudaArena) -> None:
    extent = arena.create(GRANULARITY)
    handles = driver.handles
    for _ in range(3):
        extent.scrub()
    assert driver.used_bytes(1) == GRANULARITY
    assert driver.handles == handles


def test_on_a_full_device_an_extent_is_zeroed_in_place(
    driver: FakeDriver,
    arena: CudaArena,
    addresses: CudaAddressRange,
    caplog: pytest.LogCaptureFixture,
) -> None:
    extents = [arena.create(2 * GRANULARITY) for _ in range(4)]
    assert driver.used_bytes(1) == driver.memory_bytes
    address = map_extent(addresses, 0, extents[0])
    driver.write(address, b"old")
    with caplog.at_level(logging.WARNING):
        for extent in extents:
            extent.scrub()
    assert driver.read(address, 2 * GRANULARITY) == 2 * ZEROS
    warnings = [record for record in caplog.records if "in place" in record.getMessage()]
    assert len(warnings) == 1, "one for each extent would drown the log"


def test_a_scrub_that_fails_can_be_repeated(
    driver: FakeDriver, arena: CudaArena, addresses: CudaAddressRange
) -> None:
    extent = arena.create(GRANULARITY)
    address = map_extent(addresses, 0, extent)
    driver.write(address, b"old")
    addresses.unmap(0, GRANULARITY)
    before = driver.used_bytes(1), driver.handles, len(driver.reservations), len(driver.mappings)
    with driver.fail("cuMemsetD32Async", UNKNOWN), pytest.raises(OSError, match="UNKNOWN"):
        extent.scrub()
    after = driver.used_bytes(1), driver.handles, len(driver.reservations), len(driver.mappings)
    assert after == before
    extent.scrub()
    assert driver.read(map_extent(addresses, 0, extent), GRANULARITY) == ZEROS


def test_what_does_not_fit_is_refused_with_what_is_free(
    driver: FakeDriver, arena: CudaArena
) -> None:
    arena.create(3 * GRANULARITY)
    with pytest.raises(SwiftCacheError, match=r"12 MiB on cuda:1: 10 MiB are free") as refusal:
        arena.create(6 * GRANULARITY)
    assert "\n" not in str(refusal.value)
    assert driver.used_bytes(1) == 3 * GRANULARITY


def test_no_room_for_a_context_is_no_leak(driver: FakeDriver, arena: CudaArena) -> None:
    with (
        driver.fail("cuDevicePrimaryCtxRetain", OUT_OF_MEMORY),
        pytest.raises(SwiftCacheError, match="0 B are free"),
    ):
        arena.create(GRANULARITY)
    assert driver.used_bytes(1) == 0
    arena.create(GRANULARITY)


@pytest.mark.parametrize("size_bytes", [0, -GRANULARITY, GRANULARITY + 4096])
def test_sizes_are_whole_granules(driver: FakeDriver, arena: CudaArena, size_bytes: int) -> None:
    with pytest.raises(ValueError, match=str(GRANULARITY)):
        arena.create(size_bytes)


def test_some_memory_is_left_to_others(driver: FakeDriver, arena: CudaArena) -> None:
    driver.memory_bytes = SPARE_BYTES + 5 * GRANULARITY
    assert arena.available_bytes() == 5 * GRANULARITY
    arena.create(2 * GRANULARITY)
    assert arena.available_bytes() == 3 * GRANULARITY
    driver.memory_bytes = SPARE_BYTES
    assert arena.available_bytes() == 0


def test_no_context_is_kept_when_there_is_nothing_to_zero(driver: FakeDriver) -> None:
    arena = CudaArena(1, context_idle_s=0.05)
    assert driver.context_most == 0, "a context before anything is zeroed"
    extent = arena.create(GRANULARITY)
    wait_until(lambda: driver.contexts == [0, 0], 30, "the context to be given back", 0.01)
    assert driver.streams == 0
    extent.scrub()
    assert driver.context_most == 1
    wait_until(lambda: driver.contexts == [0, 0], 30, "the context to be given back again", 0.01)
    assert not driver.reservations


def test_a_context_can_be_kept(driver: FakeDriver) -> None:
    extent = CudaArena(1, context_idle_s=None).create(GRANULARITY)
    extent.scrub()
    assert driver.contexts == [0, 1]


def test_zeroing_spoils_no_graph_that_another_thread_captures(
    driver: FakeDriver, arena: CudaArena
) -> None:
    before = driver.capture_mode
    arena.create(GRANULARITY)
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert driver.modes_while_mapping == {relaxed}
    assert driver.capture_mode == before


def test_the_arena_of_a_gpu(driver: FakeDriver) -> None:
    arena = arena_for("cuda:1")
    assert arena.device == "cuda:1"
    assert arena.granularity_bytes == GRANULARITY


@pytest.mark.parametrize("device", ["cuda", "cuda:", "cuda:-1", "cuda:x", "gpu:0", "cuda:0:1"])
def test_devices_that_are_none(driver: FakeDriver, device: str) -> None:
    with pytest.raises(SwiftCacheError, match=r"expected host, or cuda:0"):
        arena_for(device)


def test_a_device_that_is_not_there(driver: FakeDriver) -> None:
    with pytest.raises(SwiftCacheError, match=r"'cuda:2'.*cuda:0 to cuda:1"):
        CudaArena(2)
    driver.devices = 0
    with pytest.raises(SwiftCacheError, match="no CUDA device"):
        CudaArena(0)


def test_a_device_that_cannot_share(driver: FakeDriver) -> None:
    driver.can_share = False
    with pytest.raises(SwiftCacheError, match="use host memory"):
        CudaArena(0)


def test_a_driver_that_does_not_start(driver: FakeDriver) -> None:
    mismatch = cu.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    with driver.fail("cuInit", mismatch), pytest.raises(SwiftCacheError, match="DRIVER_MISMATCH"):
        CudaArena(0)


def test_the_same_gpu_has_the_same_id_under_any_ordinal(driver: FakeDriver) -> None:
    uuid = CudaArena(1).uuid
    assert uuid == "GPU-00000000-0000-0000-0000-000000000001"
    assert ordinal_of(uuid) == 1
    driver.devices = 1
    assert ordinal_of(uuid) is None


def test_a_machine_without_a_driver_has_no_devices(driver: FakeDriver) -> None:
    assert device_count() == 2
    with driver.fail("cuInit", cu.CUresult.CUDA_ERROR_NO_DEVICE):
        assert device_count() == 0
