"""What the steps of gpu_check_memory share: how they report, and a donor to work with."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import (
    PrimaryContext,
    call,
    can_access_peer,
    device,
    device_count,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import device_memory, recv_fds, send_fds
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.topology.bandwidth import measure_bandwidth

STEP_TIMEOUT_S = 60
SIZE = 32 << 20
RECEIVER = 0


def say(what: str, found: object) -> None:
    print(f"   {what}: {found}", flush=True)


def expect(what: str, holds: bool) -> None:
    say(what, "yes" if holds else "NO")
    if not holds:
        sys.exit(1)


def attempt(
    what: str, function: Callable[..., Any], *arguments: Any, expected: bool | None = None
) -> bool:
    """Say how it went, and return it; `expected`: whether it must work or be refused."""
    try:
        function(*arguments)
        worked, found = True, "works"
    except (SwiftCacheError, OSError) as error:
        worked, found = False, f"{type(error).__name__}: {error}"
    say(what, found)
    if expected is not None:
        expect("as expected", worked == expected)
    return worked


def timed(what: str, times: int, function: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    for _ in range(times):
        result = function()
    say(what, f"{(time.perf_counter() - started) / times * 1e3:.3f} ms")
    return result


def donor_ordinal() -> int:
    return 1 if device_count() > 1 and can_access_peer(RECEIVER, 1) else 0


def context_active(ordinal: int) -> bool:
    return bool(cu.cuDevicePrimaryCtxGetState(device(ordinal))[2])


def rate(address: int) -> str:
    return f"{measure_bandwidth(RECEIVER, address, SIZE):.1f} GB/s"


def map_one(addresses: Any, slot: int, descriptor: int) -> None:
    addresses.map(slot * SIZE, descriptor, SIZE)
    os.close(descriptor)


def fill(address: int, value: int) -> None:
    with closing(PrimaryContext(RECEIVER)) as context, context.current():
        call(cu.cuMemsetD8, address, value, SIZE)
        call(cu.cuCtxSynchronize)


def is_filled(address: int, value: int) -> bool:
    data = np.empty(SIZE, dtype=np.uint8)
    with closing(PrimaryContext(RECEIVER)) as context, context.current():
        call(cu.cuMemcpyDtoH, data.ctypes.data, address, SIZE)
    return bool(np.all(data == value))


@contextlib.contextmanager
def donor(ordinal: int, extents: int) -> Iterator[socket.socket]:
    """A process that holds extents and does what `ask` tells it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(STEP_TIMEOUT_S)
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno()), str(ordinal)],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    try:
        ask(ours, f"create {extents}")
        yield ours
    finally:
        process.kill()
        process.wait()


def ask(commands: socket.socket, command: str, wait: bool = True) -> list[int]:
    """Have the donor do something; returns the descriptors it answers with."""
    commands.send(command.encode())
    return recv_fds(commands, 64, 1).descriptors if wait else []


def be_donor(commands: socket.socket, ordinal: int) -> None:
    arena = CudaArena(ordinal, context_idle_s=0.5)
    extents: list[Any] = []
    raw: list[Any] = []
    while command := commands.recv(64).decode():
        verb, _, number = command.partition(" ")
        descriptors: list[int] = []
        if verb == "create":
            extents += [arena.create(SIZE) for _ in range(int(number))]
        elif verb == "raw":
            raw += [device_memory.create(ordinal, SIZE) for _ in range(int(number))]
        elif verb == "scrub":
            for extent in extents:
                extent.scrub()
        elif verb == "share":
            descriptors.append(extents[int(number)].share())
        elif verb == "idle":
            while context_active(ordinal):
                time.sleep(0.05)
        elif verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        send_fds(commands, b"done", descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    be_donor(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
