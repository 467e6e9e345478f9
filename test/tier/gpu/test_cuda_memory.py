"""GPU extents on a real driver: between processes, after scrubs and after deaths."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from support.gpu_memory import GpuDonor, GpuView, gpu_donor
from support.processes import wait_until
from support.raw_memory import DEADLINE_S, open_descriptors, record_sockets, run_child
from swiftcache_tier.cuda_driver import device_count, device_uuid
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena, MapRequest, send_fds
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
from swiftcache_tier.sizes import format_size
from swiftcache_tier.topology import free_memory_bytes, load_nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() == 0, reason="needs a CUDA GPU"),
]

SIZE = 8 << 20
SLOTS = 8
ZEROS = bytes(SIZE)
PATTERN = bytes(range(256)) * (SIZE // 256)


@pytest.fixture
def addresses() -> Iterator[CudaAddressRange]:
    addresses = CudaAddressRange(SLOTS * SIZE, ordinal=0)
    yield addresses
    addresses.close()


@pytest.fixture
def donor(donor_ordinal: int) -> Iterator[GpuDonor]:
    with gpu_donor(donor_ordinal, SIZE) as donor:
        yield donor


def map_slot(addresses: CudaAddressRange, slot: int, donor: GpuDonor) -> int:
    """Map the donor's extent and return its address."""
    descriptor = donor.share()
    try:
        addresses.map(slot * SIZE, descriptor, SIZE)
    finally:
        os.close(descriptor)
    return addresses.base + slot * SIZE


def test_lent_memory_is_zero_and_then_what_was_written(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    address = map_slot(addresses, 0, donor)
    assert view.read(address, SIZE) == ZEROS
    view.write(address, PATTERN)
    assert view.read(address, SIZE) == PATTERN
    view.fill(address, 0x01020304, SIZE)
    assert view.read(address, SIZE) == b"\4\3\2\1" * (SIZE // 4)


def test_an_extent_mapped_twice_is_one_memory(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    one, other = map_slot(addresses, 0, donor), map_slot(addresses, 3, donor)
    view.write(one, PATTERN)
    assert view.read(other, SIZE) == PATTERN
    addresses.unmap(0, SIZE)
    assert view.read(other, SIZE) == PATTERN


def test_several_are_mapped_together(
    donor_ordinal: int, addresses: CudaAddressRange, view: GpuView
) -> None:
    places = [0, 1, 2, 6, 5, 4]
    with gpu_donor(donor_ordinal, SIZE, extents=len(places)) as donor:
        descriptors = [donor.share(number) for number in range(len(places))]
        reading, writing = os.pipe()
        asked = [
            MapRequest(place * SIZE, descriptor, SIZE)
            for place, descriptor in zip(places, descriptors, strict=True)
        ]
        mapped, problem = addresses.map_each([*asked, MapRequest(3 * SIZE, reading, SIZE)])
        for descriptor in (*descriptors, reading, writing):
            os.close(descriptor)
        assert mapped == len(places)
        assert "is no GPU extent" in str(problem)
        # Across the edges of neighbours, which have their access from one call.
        view.fill(addresses.base, 0x01010101, 3 * SIZE)
        for place in places:
            address = addresses.base + place * SIZE
            assert view.read(address, SIZE) == (b"\1" if place < 3 else b"\0") * SIZE
            view.write(address, PATTERN)
        addresses.unmap(0, 3 * SIZE)
        addresses.unmap(4 * SIZE, 3 * SIZE)
        assert addresses.mapped_bytes == 0
        assert map_slot(addresses, 3, donor) == addresses.base + 3 * SIZE
        assert view.read(addresses.base + 3 * SIZE, SIZE) == PATTERN


def test_addresses_can_be_used_again(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    view.write(map_slot(addresses, 1, donor), PATTERN)
    addresses.unmap(SIZE, SIZE)
    assert view.read(map_slot(addresses, 1, donor), SIZE) == PATTERN


def test_data_outlives_a_donor_that_is_killed(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    address = map_slot(addresses, 0, donor)
    view.write(address, PATTERN)
    donor.kill()
    assert view.read(address, SIZE) == PATTERN
    view.fill(address, 0, SIZE)
    assert view.read(address, SIZE) == ZEROS


def test_extents_outlive_the_context_in_which_they_were_zeroed(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    view.write(map_slot(addresses, 0, donor), PATTERN)
    wait_until(lambda: not donor.holds_context(), DEADLINE_S, "the donor's context to be gone")
    assert view.read(map_slot(addresses, 1, donor), SIZE) == PATTERN
    donor.scrub()
    assert view.read(map_slot(addresses, 2, donor), SIZE) == ZEROS


def test_a_stale_descriptor_does_not_reach_the_next_owner(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    stale_descriptor = donor.share()
    stale_address = map_slot(addresses, 0, donor)
    view.write(stale_address, PATTERN)
    donor.scrub()
    address = map_slot(addresses, 1, donor)
    assert view.read(address, SIZE) == ZEROS
    view.fill(address, 0x7777_7777, SIZE)
    view.fill(stale_address, 0x5555_5555, SIZE)
    addresses.map(2 * SIZE, stale_descriptor, SIZE)
    os.close(stale_descriptor)
    assert view.read(addresses.base + 2 * SIZE, SIZE) == b"\x55" * SIZE
    assert view.read(address, SIZE) == b"\x77" * SIZE


def test_a_donor_that_ends_frees_what_nobody_mapped(donor_ordinal: int) -> None:
    uuid = device_uuid(donor_ordinal)
    before = free_memory_bytes(uuid, load_nvml())
    if before is None:
        pytest.skip("needs NVML")
    with gpu_donor(donor_ordinal, 64 << 20, extents=4) as donor:
        descriptor = donor.share(3)
        os.close(descriptor)
        taken = before - (free_memory_bytes(uuid, load_nvml()) or 0)
        assert taken >= 256 << 20
        donor.kill()
    wait_until(
        lambda: (free_memory_bytes(uuid, load_nvml()) or 0) > before - (32 << 20),
        DEADLINE_S,
        "the memory of a donor that was killed to be free",
    )


def test_descriptors_of_something_else_are_refused(addresses: CudaAddressRange) -> None:
    reading, writing = os.pipe()
    extent = HostArena().create(SIZE)
    wrong = [reading, writing, extent.share(), os.open("/dev/null", os.O_RDWR), os.eventfd(7)]
    # The driver's own device nodes are of the kind that its descriptors are.
    for node in ("/dev/nvidiactl", "/dev/nvidia0"):
        with contextlib.suppress(OSError):
            wrong.append(os.open(node, os.O_RDWR))
    for descriptor in wrong:
        with pytest.raises(SwiftCacheError, match="is no GPU extent") as refusal:
            addresses.map(0, descriptor, SIZE)
        assert "\n" not in str(refusal.value)
        os.close(descriptor)
    with pytest.raises(SwiftCacheError, match="is no GPU extent"):
        addresses.map(0, wrong[0], SIZE)
    assert addresses.mapped_bytes == 0
    extent.close()


def test_an_extent_of_another_size_is_refused(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    descriptor = donor.share()
    for size_bytes in (SIZE // 2, 2 * SIZE):
        with pytest.raises(SwiftCacheError, match="another size"):
            addresses.map(0, descriptor, size_bytes)
    addresses.map(0, descriptor, SIZE)
    os.close(descriptor)
    assert view.read(addresses.base, SIZE) == ZEROS


def test_a_hundred_rounds_leak_nothing(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView, donor_ordinal: int
) -> None:
    def round_of_use() -> None:
        address = map_slot(addresses, 0, donor)
        view.fill(address, 1, SIZE)
        addresses.unmap(0, SIZE)
        donor.scrub()

    round_of_use()
    nvml = load_nvml()
    uuids = {device_uuid(0), device_uuid(donor_ordinal)}
    before = {uuid: free_memory_bytes(uuid, nvml) for uuid in uuids}
    descriptors = open_descriptors()
    for _ in range(100):
        round_of_use()
    assert open_descriptors() == descriptors
    for uuid, free_before in before.items():
        free_after = free_memory_bytes(uuid, nvml)
        if free_before is not None and free_after is not None:
            # 100 extents would be 800 MiB.
            assert free_after > free_before - (64 << 20)


def test_any_thread_maps_while_another_captures_a_graph(
    donor: GpuDonor, addresses: CudaAddressRange, view: GpuView
) -> None:
    import torch

    problems: list[BaseException] = []

    def map_and_zero() -> None:
        try:
            map_slot(addresses, 0, donor)
            CudaArena(0, context_idle_s=None).create(SIZE).close()
            addresses.unmap(0, SIZE)
        except BaseException as error:
            problems.append(error)

    numbers = torch.zeros(4, device="cuda:0")
    numbers.add_(0)  # loads the kernel, which a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers.add_(1)
        thread = threading.Thread(target=map_and_zero)
        thread.start()
        thread.join(DEADLINE_S)
        numbers.add_(1)
    assert problems == []
    graph.replay()
    torch.cuda.synchronize()
    assert numbers.tolist() == [2, 2, 2, 2]


def test_more_memory_than_there_is_is_refused(donor_ordinal: int) -> None:
    arena = CudaArena(donor_ordinal)
    available = arena.available_bytes()
    assert 0 < available < 1 << 40
    with pytest.raises(SwiftCacheError, match=r"1 TiB on cuda:\d: .* are free") as refusal:
        arena.create(1 << 40)
    assert "\n" not in str(refusal.value)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(SwiftCacheError, match=f"'cuda:{device_count()}'"):
        CudaArena(device_count())


def test_memory_of_a_gpu_that_is_hidden_is_refused_or_works() -> None:
    """Whether a driver can map it differs; what may not happen is a crash or a riddle."""
    if device_count() < 2:
        pytest.skip("needs two GPUs")
    script = (
        "import os, sys, socket\n"
        f"os.environ['CUDA_VISIBLE_DEVICES'] = '{device_uuid(0)}'\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "from swiftcache_tier.extents import recv_fds\n"
        "from swiftcache_tier.extents.cuda_address_range import CudaAddressRange\n"
        "peer = socket.socket(fileno=int(sys.argv[1]))\n"
        "peer.settimeout(60)\n"
        "[descriptor] = recv_fds(peer, 64, 1).descriptors\n"
        f"addresses = CudaAddressRange({SIZE}, ordinal=0)\n"
        "try:\n"
        f"    addresses.map(0, descriptor, {SIZE})\n"
        "    print('works')\n"
        "except SwiftCacheError as error:\n"
        "    print('refused:', error)\n"
    )
    ours, theirs = record_sockets()
    with ours, theirs, gpu_donor(1, SIZE) as donor:
        descriptor = donor.share()
        send_fds(ours, b"take", [descriptor])
        os.close(descriptor)
        status, output = run_child(script, theirs)
    print(f"memory of a hidden GPU: {output.strip()}")
    assert status == 0
    assert output.startswith("works") or "CUDA_VISIBLE_DEVICES" in output


def test_what_a_donor_costs_its_gpu(donor_ordinal: int) -> None:
    """Prints it; the bounds are those between a donor that costs nothing and one that leaks."""
    nvml = load_nvml()
    uuid = device_uuid(donor_ordinal)
    before = free_memory_bytes(uuid, nvml)
    if before is None:
        pytest.skip("needs NVML")
    lent = 32 << 20

    def cost() -> int:
        return before - lent - (free_memory_bytes(uuid, nvml) or 0)

    with gpu_donor(donor_ordinal, lent, context_idle_s=None) as donor:
        assert donor.holds_context()
        with_context = cost()
        donor.kill()
    with gpu_donor(donor_ordinal, lent, context_idle_s=0.01) as donor:
        wait_until(lambda: not donor.holds_context(), DEADLINE_S, "the context to be gone")
        without_context = cost()
    print(
        f"a donor costs its GPU {format_size(max(0, with_context))} with a context and "
        f"{format_size(max(0, without_context))} without"
    )
    assert without_context <= with_context < 2 << 30
