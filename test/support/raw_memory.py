"""What the tests of extents share: raw memory, open descriptors, children."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

PAGE = os.sysconf("SC_PAGE_SIZE")
DEADLINE_S = 60


def peek(address: int, count: int) -> bytes:
    return ctypes.string_at(address, count)


def poke(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


def open_descriptors() -> dict[str, str]:
    """What each open descriptor of this process is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@contextlib.contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def record_sockets() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(DEADLINE_S)
    other.settimeout(DEADLINE_S)
    return one, other


class Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    permissions: str


def mappings(start: int, end: int) -> list[Mapping]:
    """The mappings of this process that meet the addresses from `start` to `end`."""
    found = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, permissions = line.split()[:2]
            low, high = (int(part, 16) for part in addresses.split("-"))
            if low < end and start < high:
                found.append(Mapping(low, high, permissions))
    return found


@contextlib.contextmanager
def child(script: str, peer: socket.socket | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that runs `script`; the descriptor of `peer` is its `sys.argv[1]`."""
    descriptors = [] if peer is None else [peer.fileno()]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, descriptors)],
        pass_fds=descriptors,
        # Without a peer nothing is closed for the child: close-on-exec is for the code under test.
        close_fds=bool(descriptors),
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def run_child(script: str, peer: socket.socket | None = None) -> tuple[int, str]:
    """Exit status (minus the signal, if one ended it) and output of a child that runs `script`."""
    with child(script, peer) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, output.decode()
