"""One range of addresses, parts of which are backed by extents."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.raw_memory import (
    PAGE,
    mappings,
    no_descriptor_leaks,
    peek,
    poke,
    record_sockets,
    run_child,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Extent, HostAddressRange, HostArena

SLOT = 4 * PAGE
SLOTS = 8


@pytest.fixture
def addresses() -> Iterator[HostAddressRange]:
    addresses = HostAddressRange(SLOTS * SLOT)
    yield addresses
    addresses.close()


@pytest.fixture
def extent() -> Iterator[Extent]:
    extent = HostArena().create(SLOT)
    yield extent
    extent.close()


def map_slot(addresses: HostAddressRange, slot: int, extent: Extent) -> None:
    descriptor = extent.share()
    try:
        addresses.map(slot * SLOT, descriptor, SLOT)
    finally:
        os.close(descriptor)


def accessible_slots(addresses: HostAddressRange) -> set[int]:
    """Slots that can be read and written; fails if an address of the range is not reserved."""
    reached = addresses.base
    accessible: set[int] = set()
    for start, end, permissions in mappings(addresses.base, addresses.base + addresses.size_bytes):
        assert start <= reached, "a hole that any other mmap may take"
        reached = end
        if permissions != "---p":
            assert permissions == "rw-s"
            first, last = (start - addresses.base) // SLOT, (end - addresses.base) // SLOT
            accessible.update(range(first, last))
    assert reached >= addresses.base + addresses.size_bytes
    return accessible


def test_extents_back_to_back_read_as_one_memory(addresses: HostAddressRange) -> None:
    arena = HostArena()
    for slot in (3, 2):
        extent = arena.create(SLOT)
        map_slot(addresses, slot, extent)
        extent.close()
    edge = addresses.base + 3 * SLOT
    poke(edge - 3, b"across")
    assert peek(edge - 3, 6) == b"across"
    assert accessible_slots(addresses) == {2, 3}
    assert addresses.mapped_bytes == 2 * SLOT


def test_the_same_extent_may_be_mapped_at_two_places(
    addresses: HostAddressRange, extent: Extent
) -> None:
    map_slot(addresses, 0, extent)
    map_slot(addresses, 5, extent)
    poke(addresses.base, b"alias")
    assert peek(addresses.base + 5 * SLOT, 5) == b"alias"


def test_an_address_range_far_larger_than_ram_costs_nothing() -> None:
    addresses = HostAddressRange(2**40)
    assert len(mappings(addresses.base, addresses.base + 2**40)) == 1
    addresses.close()
    assert mappings(addresses.base, addresses.base + PAGE) == []


class RangeMachine(RuleBasedStateMachine):
    """Any order of map and unmap, against a dictionary of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses = HostAddressRange(SLOTS * SLOT)
        self.arena = HostArena()
        self.written: dict[int, bytes] = {}

    @precondition(lambda self: len(self.written) < SLOTS)
    @rule(data=st.data(), mark=st.binary(min_size=4, max_size=4))
    def map(self, data: st.DataObject, mark: bytes) -> None:
        slot = data.draw(st.sampled_from(sorted(set(range(SLOTS)) - set(self.written))))
        extent = self.arena.create(SLOT)
        map_slot(self.addresses, slot, extent)
        extent.close()
        assert peek(self.addresses.base + slot * SLOT, SLOT) == bytes(SLOT)
        poke(self.addresses.base + slot * SLOT, mark)
        self.written[slot] = mark

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.written)))
        self.addresses.unmap(slot * SLOT, SLOT)
        del self.written[slot]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def unmap_neighbours(self, data: st.DataObject) -> None:
        first = last = data.draw(st.sampled_from(sorted(self.written)))
        while last + 1 in self.written:
            last += 1
        self.addresses.unmap(first * SLOT, (last + 1 - first) * SLOT)
        for slot in range(first, last + 1):
            del self.written[slot]

    @precondition(lambda self: self.written)
    @rule(data=st.data(), shift=st.integers(-3, 3))
    def map_over_something(self, data: st.DataObject, shift: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.written)))
        offset = min(max(slot * SLOT + shift * PAGE, 0), (SLOTS - 1) * SLOT)
        extent = self.arena.create(SLOT)
        descriptor = extent.share()
        with pytest.raises(ValueError, match="already mapped"):
            self.addresses.map(offset, descriptor, SLOT)
        os.close(descriptor)
        extent.close()

    @rule(slot=st.integers(0, SLOTS - 1))
    def unmap_something_else(self, slot: int) -> None:
        offset, size_bytes = slot * SLOT, SLOT if slot not in self.written else PAGE
        with pytest.raises(ValueError, match="no extent"):
            self.addresses.unmap(offset, size_bytes)

    @invariant()
    def holds_what_was_written(self) -> None:
        assert accessible_slots(self.addresses) == set(self.written)
        for slot, mark in self.written.items():
            assert peek(self.addresses.base + slot * SLOT, 4) == mark
        assert self.addresses.mapped_bytes == len(self.written) * SLOT

    def teardown(self) -> None:
        self.addresses.close()


TestRange = RangeMachine.TestCase
TestRange.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (-SLOT, SLOT),
        (SLOTS * SLOT, SLOT),
        (SLOTS * SLOT - PAGE, SLOT),
        (1, SLOT),
        (0, SLOT + 1),
        (0, 0),
        (SLOT, -SLOT),
        (0, 2**62),
    ],
)
def test_places_that_are_not_in_the_range_are_refused(
    addresses: HostAddressRange, extent: Extent, offset: int, size_bytes: int
) -> None:
    descriptor = extent.share()
    with pytest.raises(ValueError, match=r"range|multiples"):
        addresses.map(offset, descriptor, size_bytes)
    os.close(descriptor)
    assert accessible_slots(addresses) == set()


def test_close_unmaps_everything_and_may_be_repeated(extent: Extent) -> None:
    with no_descriptor_leaks():
        addresses = HostAddressRange(SLOTS * SLOT)
        map_slot(addresses, 1, extent)
        addresses.close()
        # Others may have been given some of the addresses since: none of them is the extent's.
        assert all(
            "s" not in mapping.permissions
            for mapping in mappings(addresses.base, addresses.base + SLOTS * SLOT)
        )
        # A second close must not take away what has been put there meanwhile.
        other = HostAddressRange(SLOTS * SLOT)
        addresses.close()
        assert accessible_slots(other) == set()
        other.close()
        with pytest.raises(ValueError, match="closed"):
            map_slot(addresses, 1, extent)
        with pytest.raises(ValueError, match="no extent"):
            addresses.unmap(SLOT, SLOT)


@pytest.mark.parametrize("size_bytes", [0, -PAGE, PAGE + 1])
def test_a_range_is_whole_pages(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        HostAddressRange(size_bytes)


def test_a_limit_on_address_space_says_what_to_do() -> None:
    status, output = run_child(
        "import resource\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "from swiftcache_tier.extents import HostAddressRange\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**34, 2**34))\n"
        "try: HostAddressRange(2**40)\n"
        "except SwiftCacheError as error: print(error)\n"
    )
    assert status == 0
    assert output.count("\n") == 1
    assert "1 TiB" in output
    assert "ulimit -v" in output


TOUCH = f"""
import ctypes, resource
from swiftcache_tier.extents import HostAddressRange, HostArena
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
addresses = HostAddressRange({2 * SLOT})
extent = HostArena().create({SLOT})
addresses.map(0, extent.share(), {SLOT})
ctypes.string_at(addresses.base, {SLOT})
if {{unmapped}}: addresses.unmap(0, {SLOT})
print("touching", flush=True)
ctypes.string_at(addresses.base + {{offset}}, 1)
print("survived", flush=True)
"""


@pytest.mark.parametrize(
    ("unmapped", "offset", "faults"),
    [(False, 0, False), (False, SLOT, True), (True, 0, True)],
)
def test_only_mapped_addresses_can_be_touched(unmapped: bool, offset: int, faults: bool) -> None:
    status, output = run_child(TOUCH.format(unmapped=unmapped, offset=offset))
    if faults:
        assert (status, output) == (-signal.SIGSEGV, "touching\n")
    else:
        assert (status, output) == (0, "touching\nsurvived\n")


FORK = f"""
import os, socket, sys
from swiftcache_tier.extents import HostAddressRange, recv_fds
peer = socket.socket(fileno=int(sys.argv[1]))
[descriptor] = recv_fds(peer, 16, 1).descriptors
addresses = HostAddressRange({SLOT})
addresses.map(0, descriptor, {SLOT})
os.close(descriptor)
def holds_it():
    return any("memfd" in line for line in open("/proc/self/maps"))
assert holds_it()
pid = os.fork()
if pid == 0:
    os._exit(7 if holds_it() else 0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_child_does_not_keep_lent_memory(extent: Extent) -> None:
    here, there = record_sockets()
    with here, there:
        descriptor = extent.share()
        here.sendmsg([b"x"], [(1, 1, descriptor.to_bytes(4, "little"))])
        os.close(descriptor)
        assert run_child(FORK, there) == (0, "0\n")


def test_memory_returns_to_the_system_with_its_last_mapping(extent: Extent) -> None:
    addresses = HostAddressRange(SLOTS * SLOT)
    map_slot(addresses, 0, extent)
    poke(addresses.base, bytes(range(256)))
    descriptor = extent.share()
    addresses.unmap(0, SLOT)
    with mmap.mmap(descriptor, SLOT) as view:  # unmap takes the addresses, not the content
        assert view[:256] == bytes(range(256))
    os.close(descriptor)
    addresses.close()


def test_an_error_of_the_system_leaves_the_place_reserved(
    addresses: HostAddressRange, extent: Extent
) -> None:
    closed = extent.share()
    os.close(closed)
    with no_descriptor_leaks(), pytest.raises(SwiftCacheError):
        addresses.map(0, closed, SLOT)
    assert accessible_slots(addresses) == set()
    map_slot(addresses, 0, extent)
    assert accessible_slots(addresses) == {0}
