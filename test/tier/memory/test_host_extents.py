"""Host extents: what a peer can and cannot do with the memory it is lent."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from support.raw_memory import (
    DEADLINE_S,
    PAGE,
    child,
    no_descriptor_leaks,
    peek,
    poke,
    record_sockets,
    run_child,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import (
    Extent,
    HostAddressRange,
    HostArena,
    arena_for,
    check_descriptor,
    recv_fds,
)

SIZE = 16 * PAGE


@pytest.fixture
def extent() -> Iterator[Extent]:
    extent = HostArena().create(SIZE)
    yield extent
    extent.close()


@pytest.fixture
def addresses() -> Iterator[HostAddressRange]:
    with ExitStack() as stack:
        addresses = HostAddressRange(4 * SIZE)
        stack.callback(addresses.close)
        yield addresses


def map_extent(addresses: HostAddressRange, offset: int, extent: Extent) -> int:
    """Map as a receiver would; returns the address."""
    descriptor = extent.share()
    addresses.map(offset, descriptor, extent.size_bytes)
    os.close(descriptor)
    return addresses.base + offset


WRITER = f"""
import socket, sys, ctypes
from swiftcache_tier.extents import HostAddressRange, recv_fds
peer = socket.socket(fileno=int(sys.argv[1]))
record = recv_fds(peer, 16, 1)
addresses = HostAddressRange({SIZE})
addresses.map(0, record.descriptors[0], {SIZE})
assert ctypes.string_at(addresses.base, 5) == b"hello"
ctypes.memmove(addresses.base + {SIZE} - 5, b"world", 5)
"""


def test_two_processes_share_one_memory(extent: Extent, addresses: HostAddressRange) -> None:
    address = map_extent(addresses, 0, extent)
    poke(address, b"hello")
    here, there = record_sockets()
    with here, there:
        descriptor = extent.share()
        socket.send_fds(here, [b"take"], [descriptor])
        os.close(descriptor)
        assert run_child(WRITER, there) == (0, "")
    assert peek(address + SIZE - 5, 5) == b"world"


CREATOR = f"""
import signal, socket, sys, ctypes
from swiftcache_tier.extents import HostAddressRange, HostArena, send_fds
peer = socket.socket(fileno=int(sys.argv[1]))
extent = HostArena().create({SIZE})
addresses = HostAddressRange({SIZE})
addresses.map(0, extent.share(), {SIZE})
ctypes.memmove(addresses.base, b"lent", 4)
send_fds(peer, b"take", [extent.share()])
signal.pause()
"""


def test_memory_outlives_a_creator_that_is_killed(addresses: HostAddressRange) -> None:
    here, there = record_sockets()
    with here, there, child(CREATOR, there) as creator:
        [descriptor] = recv_fds(here, 16, 1).descriptors
        creator.kill()
        creator.wait(DEADLINE_S)
    addresses.map(0, descriptor, SIZE)
    os.close(descriptor)
    assert peek(addresses.base, 8) == b"lent\0\0\0\0"
    poke(addresses.base + SIZE - 1, b"x")


def test_a_new_extent_reads_as_zeros(extent: Extent, addresses: HostAddressRange) -> None:
    assert peek(map_extent(addresses, 0, extent), SIZE) == bytes(SIZE)


def test_a_peer_cannot_resize_or_seal_what_it_holds(
    extent: Extent, addresses: HostAddressRange
) -> None:
    address = map_extent(addresses, 0, extent)
    descriptor = extent.share()
    for size_bytes in (0, SIZE - PAGE, SIZE + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(descriptor)
    poke(address + SIZE - 1, b"x")


def test_descriptors_do_not_reach_programs_that_are_started(extent: Extent) -> None:
    descriptor = extent.share()
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    # The extent's own descriptor, too: none that a program inherits is a memfd.
    status, output = run_child(
        "import os\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: print(os.readlink(f'/proc/self/fd/{name}'))\n"
        "    except FileNotFoundError: pass\n"
    )
    assert status == 0
    assert "memfd" not in output


def test_scrub_frees_the_memory_and_cuts_off_whoever_still_holds_it(
    extent: Extent, addresses: HostAddressRange
) -> None:
    stale_descriptor = extent.share()
    stale = map_extent(addresses, 0, extent)
    poke(stale, b"secret" * 100)
    assert os.fstat(stale_descriptor).st_blocks > 0

    extent.scrub()

    assert os.fstat(stale_descriptor).st_blocks == 0
    assert peek(stale, SIZE) == bytes(SIZE)
    # Neither way can the two see each other's bytes.
    fresh = map_extent(addresses, SIZE, extent)
    assert peek(fresh, SIZE) == bytes(SIZE)
    poke(fresh, b"next owner")
    poke(stale + PAGE, b"former owner")
    assert peek(stale, PAGE) == bytes(PAGE)
    assert peek(fresh + PAGE, PAGE) == bytes(PAGE)
    os.pwrite(stale_descriptor, b"former owner", 0)
    assert peek(fresh, 10) == b"next owner"
    os.close(stale_descriptor)


def test_a_scrubbed_extent_can_be_lent_again_and_again(addresses: HostAddressRange) -> None:
    with no_descriptor_leaks():
        extent = HostArena().create(SIZE)
        for _ in range(3):
            address = map_extent(addresses, 0, extent)
            assert peek(address, 4) == bytes(4)
            poke(address, b"used")
            addresses.unmap(0, SIZE)
            extent.scrub()
        extent.scrub()
        extent.close()
        extent.close()


def test_a_closed_extent_is_not_used_by_mistake(extent: Extent) -> None:
    extent.close()
    for use in (extent.share, extent.scrub):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_mapped_memory_outlives_the_close_of_its_extent(
    extent: Extent, addresses: HostAddressRange
) -> None:
    address = map_extent(addresses, 0, extent)
    poke(address, b"kept")
    extent.close()
    assert peek(address, 4) == b"kept"


@pytest.mark.parametrize("size_bytes", [0, -PAGE, 1, PAGE + 1])
def test_extents_are_whole_pages(size_bytes: int) -> None:
    with no_descriptor_leaks(), pytest.raises(ValueError, match="multiple"):
        HostArena().create(size_bytes)


def test_running_out_of_open_files_says_what_to_do() -> None:
    status, output = run_child(
        "import resource\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "from swiftcache_tier.extents import HostArena\n"
        "arena, extents = HostArena(), []\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard))\n"
        "try:\n"
        "    while True: extents.append(arena.create(arena.granularity_bytes))\n"
        "except SwiftCacheError as error: print(error)\n"
        "assert 0 < len(extents) < 32\n"
    )
    assert status == 0
    assert output.count("\n") == 1
    assert "ulimit -n" in output


def test_arena_of_a_device() -> None:
    arena = arena_for("host")
    assert arena.device == "host"
    assert 0 < arena.available_bytes() <= psutil.virtual_memory().total
    with pytest.raises(SwiftCacheError, match=r"'disk'.*host"):
        arena_for("disk")


def memfd(size_bytes: int, seals: int = 0, flags: int = os.MFD_ALLOW_SEALING) -> int:
    descriptor = os.memfd_create("test", flags)
    os.ftruncate(descriptor, size_bytes)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def regular_file(folder: str | None) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(SIZE)
        return os.dup(file.fileno())


def read_only(descriptor: int) -> int:
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    os.close(descriptor)
    return again


def one_end(pair: tuple[int, int]) -> int:
    os.close(pair[1])
    return pair[0]


def detached(sock: socket.socket) -> int:
    return sock.detach()


NOT_EXTENTS: dict[str, tuple[Callable[[], int], str]] = {
    "pipe": (lambda: one_end(os.pipe()), "not a memfd"),
    "socket": (lambda: detached(socket.socket(socket.AF_UNIX)), "not a memfd"),
    "folder": (lambda: os.open("/", os.O_RDONLY), "not a memfd"),
    "device": (lambda: os.open("/dev/null", os.O_RDWR), "not a memfd"),
    "regular file": (lambda: regular_file(None), "not a memfd|not sealed"),
    "file in RAM": (lambda: regular_file("/dev/shm"), "not a memfd|not sealed"),
    "smaller": (lambda: memfd(SIZE - PAGE, ALL_SEALS), f"{SIZE - PAGE} bytes"),
    "larger": (lambda: memfd(SIZE + PAGE, ALL_SEALS), f"{SIZE + PAGE} bytes"),
    "empty": (lambda: memfd(0, ALL_SEALS), "holds 0 bytes"),
    "unsealed": (lambda: memfd(SIZE), "not sealed"),
    "cannot be sealed": (lambda: memfd(SIZE, flags=0), "not sealed"),
    "can shrink": (lambda: memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SHRINK), "not sealed"),
    "can grow": (lambda: memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_GROW), "not sealed"),
    "can be sealed": (lambda: memfd(SIZE, ALL_SEALS & ~fcntl.F_SEAL_SEAL), "not sealed"),
    "cannot be written": (lambda: memfd(SIZE, ALL_SEALS | fcntl.F_SEAL_WRITE), "against writing"),
    "cannot be written later": (lambda: memfd(SIZE, ALL_SEALS | 0x10), "against writing"),
    "read only": (lambda: read_only(memfd(SIZE, ALL_SEALS)), "not open for reading and writing"),
}


@pytest.mark.parametrize("kind", NOT_EXTENTS)
def test_what_is_no_extent_is_refused_in_one_line_and_never_mapped(
    kind: str, addresses: HostAddressRange
) -> None:
    make, reason = NOT_EXTENTS[kind]
    with no_descriptor_leaks():
        descriptor = make()
        with pytest.raises(SwiftCacheError, match=reason) as caught:
            check_descriptor(descriptor, SIZE)
        assert "\n" not in str(caught.value)
        with pytest.raises(SwiftCacheError, match=reason):
            addresses.map(0, descriptor, SIZE)
        assert addresses.mapped_bytes == 0
        os.close(descriptor)  # it stays the caller's


def test_a_descriptor_that_is_not_open_is_refused() -> None:
    descriptor = os.dup(0)
    os.close(descriptor)
    with pytest.raises(SwiftCacheError, match="Bad file descriptor"):
        check_descriptor(descriptor, SIZE)


def test_an_extent_is_recognised(extent: Extent, tmp_path: Path) -> None:
    descriptor = extent.share()
    check_descriptor(descriptor, SIZE)
    os.close(descriptor)
