"""Host extents that a GPU reads and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.gpu_memory import GpuView
from support.raw_memory import no_descriptor_leaks, peek, poke
from swiftcache_tier.cuda_driver import device_count
from swiftcache_tier.extents import Extent, HostArena, JoinedAddressRange, address_range_for
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.extents.pinned import PinnedHostAddressRange
from swiftcache_tier.topology.bandwidth import measure_bandwidth
from swiftcache_tier.topology.numa import numa_nodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() == 0, reason="needs a CUDA GPU"),
]

SIZE = 8 << 20
PATTERN = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def addresses() -> Iterator[PinnedHostAddressRange]:
    addresses = PinnedHostAddressRange(4 * SIZE, ordinal=0, numa_node=(numa_nodes() or [0])[-1])
    yield addresses
    addresses.close()


@pytest.fixture
def extent() -> Iterator[Extent]:
    extent = HostArena().create(SIZE)
    yield extent
    extent.close()


def map_slot(
    addresses: PinnedHostAddressRange | JoinedAddressRange, offset: int, extent: Extent
) -> int:
    descriptor = extent.share()
    try:
        addresses.map(offset, descriptor, SIZE)
    finally:
        os.close(descriptor)
    return addresses.base + offset


def test_cpu_and_gpu_see_one_memory_at_one_address(
    addresses: PinnedHostAddressRange, extent: Extent, view: GpuView
) -> None:
    address = map_slot(addresses, SIZE, extent)
    assert view.read(address, SIZE) == bytes(SIZE)
    poke(address, PATTERN)
    assert view.read(address, SIZE) == PATTERN
    view.fill(address, 0x01020304, SIZE)
    assert peek(address, 4) == b"\4\3\2\1"
    assert peek(address + SIZE - 4, 4) == b"\4\3\2\1"


def test_a_hundred_rounds_leak_nothing(
    addresses: PinnedHostAddressRange, extent: Extent, view: GpuView
) -> None:
    map_slot(addresses, 0, extent)
    addresses.unmap(0, SIZE)
    with no_descriptor_leaks():
        for number in range(100):
            address = map_slot(addresses, 0, extent)
            view.fill(address, number, 4096)
            addresses.unmap(0, SIZE)
    assert view.read(map_slot(addresses, 0, extent), 1) == b"\x63"


def test_scrubbed_memory_is_zero_again(
    addresses: PinnedHostAddressRange, extent: Extent, view: GpuView
) -> None:
    address = map_slot(addresses, 0, extent)
    view.write(address, PATTERN)
    addresses.unmap(0, SIZE)
    extent.scrub()
    assert view.read(map_slot(addresses, 0, extent), SIZE) == bytes(SIZE)


def test_host_and_gpu_extents_under_one_base(extent: Extent, view: GpuView) -> None:
    gpu_extent = CudaArena(0).create(SIZE)
    joined = address_range_for("cuda:0", 1 << 40)
    for name, lent in (("host", extent), ("cuda", gpu_extent)):
        granularity = joined.granularity_bytes
        offset = -(-joined.window(name).start_bytes // granularity) * granularity
        address = map_slot(joined, offset, lent)
        view.write(address, PATTERN)
        assert view.read(address, SIZE) == PATTERN
    joined.close()
    gpu_extent.close()


def test_bandwidth_of_pinned_memory(addresses: PinnedHostAddressRange, extent: Extent) -> None:
    address = map_slot(addresses, 0, extent)
    gb_per_s = measure_bandwidth(0, address, SIZE)
    print(f"cuda:0 reads pinned host memory at {gb_per_s:.1f} GB/s")
    assert gb_per_s > 0
