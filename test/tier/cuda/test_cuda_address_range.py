"""Where a receiver maps GPU extents."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from cuda.bindings import driver as cu

from support.fake_cuda import GRANULARITY, FakeDriver
from support.raw_memory import no_descriptor_leaks
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena, MapRequest
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange

SLOTS = 8


@pytest.fixture
def addresses(driver: FakeDriver) -> Iterator[CudaAddressRange]:
    addresses = CudaAddressRange(SLOTS * GRANULARITY, ordinal=0)
    yield addresses
    addresses.close()


@pytest.fixture
def descriptor(driver: FakeDriver) -> Iterator[int]:
    """Of an extent of one granule on the peer."""
    extent = CudaArena(1, context_idle_s=None).create(GRANULARITY)
    descriptor = extent.share()
    yield descriptor
    os.close(descriptor)
    extent.close()


def test_what_is_mapped_can_be_used_by_the_receiver_alone(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    addresses.map(GRANULARITY, descriptor, GRANULARITY)
    address = addresses.base + GRANULARITY
    assert driver.read(address, GRANULARITY, ordinal=0) == bytes(GRANULARITY)
    with pytest.raises(KeyError):
        driver.read(address, 1, ordinal=1)
    assert addresses.mapped_bytes == GRANULARITY
    addresses.unmap(GRANULARITY, GRANULARITY)
    assert addresses.mapped_bytes == 0
    with pytest.raises(KeyError):
        driver.read(address, 1)


def test_one_extent_in_several_places(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    for slot in range(2):
        addresses.map(slot * GRANULARITY, descriptor, GRANULARITY)
    driver.write(addresses.base, b"seen twice")
    assert driver.read(addresses.base + GRANULARITY, 10) == b"seen twice"


def test_mapping_keeps_no_descriptor_and_no_handle(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    handles = driver.handles
    with no_descriptor_leaks():
        for _ in range(3):
            addresses.map(0, descriptor, GRANULARITY)
            addresses.unmap(0, GRANULARITY)
    assert driver.handles == handles


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (-GRANULARITY, GRANULARITY),
        (SLOTS * GRANULARITY, GRANULARITY),
        ((SLOTS - 1) * GRANULARITY, 2 * GRANULARITY),
        (4096, GRANULARITY),
        (0, GRANULARITY + 4096),
        (0, 0),
    ],
)
def test_places_that_are_none(
    driver: FakeDriver,
    addresses: CudaAddressRange,
    descriptor: int,
    offset: int,
    size_bytes: int,
) -> None:
    with pytest.raises(ValueError, match="offset"):
        addresses.map(offset, descriptor, size_bytes)
    assert not driver.mappings


def test_neighbours_are_unmapped_in_one_call(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    for place in range(1, 4):
        addresses.map(place * GRANULARITY, descriptor, GRANULARITY)
    for offset, pieces in ((0, 3), (1, 4), (2, 3)):
        with pytest.raises(ValueError, match="no extent"):
            addresses.unmap(offset * GRANULARITY, pieces * GRANULARITY)
    addresses.unmap(2 * GRANULARITY, 2 * GRANULARITY)
    assert list(driver.mappings) == [addresses.base + GRANULARITY]
    assert addresses.mapped_bytes == GRANULARITY


def test_a_place_is_taken_once(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    addresses.map(GRANULARITY, descriptor, GRANULARITY)
    with pytest.raises(ValueError, match="already mapped"):
        addresses.map(0, descriptor, 2 * GRANULARITY)
    for size_bytes in (2 * GRANULARITY, 0):
        with pytest.raises(ValueError, match="no extent"):
            addresses.unmap(GRANULARITY, size_bytes)
    with pytest.raises(ValueError, match="no extent"):
        addresses.unmap(0, GRANULARITY)


def requests(descriptors: dict[int, int]) -> list[MapRequest]:
    """To map granules there: descriptors by place."""
    return [
        MapRequest(place * GRANULARITY, descriptor, GRANULARITY)
        for place, descriptor in descriptors.items()
    ]


def test_several_cost_the_driver_no_more_than_they_must(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    handles = driver.handles
    driver.calls.clear()
    places = [0, 1, 2, 5, 6, 4]  # runs of 3, 2 and 1
    outcome = addresses.map_each(requests(dict.fromkeys(places, descriptor)))
    assert outcome == (len(places), None)
    for place in places:
        assert driver.read(addresses.base + place * GRANULARITY, 1) == b"\0"
    for name, times in {
        "cuCtxPushCurrent": 1,
        "cuDeviceCanAccessPeer": 1,
        "cuMemImportFromShareableHandle": len(places),
        "cuMemMap": len(places),
        "cuMemSetAccess": 3,
    }.items():
        assert driver.calls[name] == times, name
    assert driver.handles == handles
    assert driver.calls["cuCtxPopCurrent"] == 1
    assert addresses.mapped_bytes == len(places) * GRANULARITY
    addresses.map(3 * GRANULARITY, descriptor, GRANULARITY)
    assert driver.calls["cuDeviceCanAccessPeer"] == 1, "it is known by then"


def test_those_before_the_one_that_cannot_be_mapped_are_of_use(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    handles = driver.handles
    wrong, *_ = ends = pipe()
    mapped, problem = addresses.map_each(
        requests({0: descriptor, 1: descriptor, 2: wrong, 3: descriptor})
    )
    assert mapped == 2
    assert f"descriptor {wrong} is no GPU extent" in str(problem)
    assert sorted(driver.mappings) == [addresses.base, addresses.base + GRANULARITY]
    assert driver.read(addresses.base + GRANULARITY, 1) == b"\0"
    assert addresses.mapped_bytes == 2 * GRANULARITY
    assert driver.handles == handles
    for end in ends:
        os.close(end)


def test_access_that_is_refused_to_one_of_a_run(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    driver.without_access.add(addresses.base + 2 * GRANULARITY)
    mapped, problem = addresses.map_each(requests(dict.fromkeys([6, 7, 0, 1, 2, 3, 5], descriptor)))
    assert mapped == 4
    assert "cuMemSetAccess: CUDA_ERROR_NOT_PERMITTED" in str(problem)
    usable = [addresses.base + place * GRANULARITY for place in (0, 1, 6, 7)]
    assert sorted(driver.mappings) == usable
    for address in usable:
        assert driver.read(address, 1) == b"\0"
    driver.without_access.clear()
    assert addresses.map_each(requests(dict.fromkeys([2, 3, 5], descriptor))) == (3, None)


@pytest.mark.parametrize("place", [1, 2, SLOTS])
def test_a_place_that_is_none_among_several_maps_nothing(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int, place: int
) -> None:
    addresses.map(2 * GRANULARITY, descriptor, GRANULARITY)
    asked = [*requests({0: descriptor, 1: descriptor}), *requests({place: descriptor})]
    with pytest.raises(ValueError, match="offset"):
        addresses.map_each(asked)
    assert list(driver.mappings) == [addresses.base + 2 * GRANULARITY]
    assert addresses.mapped_bytes == GRANULARITY


def test_what_cannot_be_taken_out_again_is_no_outcome(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    """Whoever is told that an extent is not mapped must be able to rely on it."""
    driver.without_access.add(addresses.base + GRANULARITY)
    with (
        driver.fail("cuMemUnmap", cu.CUresult.CUDA_ERROR_UNKNOWN),
        pytest.raises(OSError, match="cuMemUnmap"),
    ):
        addresses.map_each(requests(dict.fromkeys([0, 1], descriptor)))
    assert addresses.mapped_bytes == 2 * GRANULARITY
    addresses.unmap(0, 2 * GRANULARITY)


def pipe() -> list[int]:
    return list(os.pipe())


def sockets() -> list[int]:
    return [end.detach() for end in socket.socketpair()]


def host_extent() -> list[int]:
    extent = HostArena().create(GRANULARITY)
    descriptor = extent.share()
    extent.close()
    return [descriptor]


def device_node() -> list[int]:
    return [os.open("/dev/null", os.O_RDWR)]


def folder() -> list[int]:
    return [os.open("/", os.O_RDONLY)]


def closed() -> list[int]:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    return [reading]


@pytest.mark.parametrize("kind", [pipe, sockets, host_extent, device_node, folder, closed])
def test_descriptors_of_something_else(
    driver: FakeDriver, addresses: CudaAddressRange, kind: Callable[[], list[int]]
) -> None:
    descriptors = kind()
    with pytest.raises(SwiftCacheError, match=f"descriptor {descriptors[0]} is no GPU extent") as e:
        addresses.map(0, descriptors[0], GRANULARITY)
    assert "\n" not in str(e.value)
    for descriptor in descriptors:
        if kind is not closed:
            os.close(descriptor)
    assert not driver.mappings
    assert driver.handles == 0
    assert addresses.mapped_bytes == 0


@pytest.mark.parametrize("result", ["CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"])
def test_an_extent_of_another_size(
    driver: FakeDriver, addresses: CudaAddressRange, result: str
) -> None:
    driver.wrong_size_result = getattr(cu.CUresult, result)
    extent = CudaArena(1, context_idle_s=None).create(2 * GRANULARITY)
    descriptor = extent.share()
    handles = driver.handles
    for size_bytes in (GRANULARITY, 3 * GRANULARITY):
        with pytest.raises(SwiftCacheError, match=f"is of another size .*{result}"):
            addresses.map(0, descriptor, size_bytes)
    assert driver.handles == handles
    addresses.map(0, descriptor, 2 * GRANULARITY)
    os.close(descriptor)


def test_memory_of_a_gpu_that_is_hidden(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    driver.hidden.add(1)
    with pytest.raises(SwiftCacheError, match="CUDA_VISIBLE_DEVICES hides"):
        addresses.map(0, descriptor, GRANULARITY)


def test_memory_of_a_gpu_out_of_reach(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    driver.peer_access = False
    handles = driver.handles
    with pytest.raises(SwiftCacheError, match="no peer access"):
        addresses.map(0, descriptor, GRANULARITY)
    assert driver.handles == handles
    extent = CudaArena(0, context_idle_s=None).create(GRANULARITY)
    own = extent.share()
    addresses.map(0, own, GRANULARITY)
    os.close(own)


@pytest.mark.parametrize(
    "failing", ["cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"]
)
def test_a_mapping_that_the_system_refuses(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int, failing: str
) -> None:
    handles = driver.handles
    with (
        driver.fail(failing, cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(OSError, match=failing),
    ):
        addresses.map(0, descriptor, GRANULARITY)
    assert not driver.mappings
    assert driver.handles == handles
    addresses.map(0, descriptor, GRANULARITY)


def test_a_piece_that_could_not_be_unmapped_stays(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    addresses.map(0, descriptor, GRANULARITY)
    with (
        driver.fail("cuMemUnmap", cu.CUresult.CUDA_ERROR_UNKNOWN),
        pytest.raises(OSError, match="cuMemUnmap"),
    ):
        addresses.unmap(0, GRANULARITY)
    assert addresses.mapped_bytes == GRANULARITY
    addresses.unmap(0, GRANULARITY)


def test_any_thread_may_map(
    driver: FakeDriver, addresses: CudaAddressRange, descriptor: int
) -> None:
    problems: list[BaseException] = []

    def map_there() -> None:
        try:
            addresses.map(0, descriptor, GRANULARITY)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=map_there)
    thread.start()
    thread.join(30)
    assert problems == []
    assert driver.read(addresses.base, 1) == b"\0"


def test_closing_gives_everything_back(driver: FakeDriver, descriptor: int) -> None:
    contexts = list(driver.contexts)
    addresses = CudaAddressRange(SLOTS * GRANULARITY, ordinal=0)
    assert driver.contexts[0] == contexts[0] + 1
    addresses.map(0, descriptor, GRANULARITY)
    addresses.map(2 * GRANULARITY, descriptor, GRANULARITY)
    addresses.close()
    addresses.close()
    assert driver.contexts == contexts
    assert not driver.mappings
    assert not driver.reservations
    with pytest.raises(ValueError, match="closed"):
        addresses.map(0, descriptor, GRANULARITY)


def test_ranges_that_cannot_be(driver: FakeDriver) -> None:
    for size_bytes in (0, GRANULARITY + 4096):
        with pytest.raises(ValueError, match=str(GRANULARITY)):
            CudaAddressRange(size_bytes, ordinal=0)
    with (
        driver.fail("cuMemAddressReserve", cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY),
        pytest.raises(SwiftCacheError, match=r"cannot reserve 2 MiB .* cuda:0"),
    ):
        CudaAddressRange(GRANULARITY, ordinal=0)
    with pytest.raises(SwiftCacheError, match="cuda:7"):
        CudaAddressRange(GRANULARITY, ordinal=7)
    assert driver.contexts == [0, 0]
