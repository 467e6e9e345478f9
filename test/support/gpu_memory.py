"""What the tests of GPU extents share: bytes at a GPU's addresses, donors in other processes."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
from collections.abc import Iterator

import numpy as np
from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from support.raw_memory import DEADLINE_S, child, record_sockets
from swiftcache_tier.cuda_driver import PrimaryContext, call
from swiftcache_tier.extents import recv_fds

_DONOR = """
import os, socket, sys, time
from cuda.bindings import driver as cu
from swiftcache_tier.cuda_driver import call, device
from swiftcache_tier.extents import send_fds
from swiftcache_tier.extents.cuda import CudaArena

peer = socket.socket(fileno=int(sys.argv[1]))
peer.settimeout({deadline_s})
arena = CudaArena({ordinal}, context_idle_s={context_idle_s})
extents = [arena.create({size_bytes}) for _ in range({extents})]
send_fds(peer, b"ready", [])
while command := peer.recv(64).decode():
    verb, number = command.split()
    descriptors = []
    answer = b"done"
    if verb == "share":
        descriptors.append(extents[int(number)].share())
    elif verb == "scrub":
        extents[int(number)].scrub()
    elif verb == "context":
        _, active = cu.cuDevicePrimaryCtxGetState(device({ordinal}))[1:]
        answer = str(int(active)).encode()
    send_fds(peer, answer, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
"""


class GpuDonor:
    """A process that holds extents of one GPU."""

    def __init__(self, process: subprocess.Popen[bytes], commands: socket.socket) -> None:
        self._process = process
        self._commands = commands
        recv_fds(commands, 64, 1)  # it is ready

    def share(self, number: int = 0) -> int:
        """A descriptor of one of its extents; the caller closes it."""
        self._commands.send(f"share {number}".encode())
        [descriptor] = recv_fds(self._commands, 64, 1).descriptors
        return descriptor

    def scrub(self, number: int = 0) -> None:
        self._commands.send(f"scrub {number}".encode())
        assert recv_fds(self._commands, 64, 1).payload == b"done"

    def holds_context(self) -> bool:
        self._commands.send(b"context 0")
        return recv_fds(self._commands, 64, 1).payload == b"1"

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait(DEADLINE_S)


@contextlib.contextmanager
def gpu_donor(
    ordinal: int, size_bytes: int, extents: int = 1, context_idle_s: float | None = 0.2
) -> Iterator[GpuDonor]:
    ours, theirs = record_sockets()
    script = _DONOR.format(
        ordinal=ordinal,
        size_bytes=size_bytes,
        extents=extents,
        context_idle_s=context_idle_s,
        deadline_s=DEADLINE_S,
    )
    with ours, theirs, child(script, theirs) as process:
        theirs.close()
        yield GpuDonor(process, ours)


class GpuView:
    """Reads and writes what one GPU sees at its addresses."""

    def __init__(self, ordinal: int = 0) -> None:
        self._context = PrimaryContext(ordinal)

    def read(self, address: int, count: int) -> bytes:
        data = np.empty(count, dtype=np.uint8)
        with self._context.current():
            call(cu.cuMemcpyDtoH, data.ctypes.data, address, count)
        return data.tobytes()

    def read_rows(self, address: int, row: int, pitch: int, rows: int) -> bytes:
        """The first `row` bytes of each `pitch`, in one copy of the copy engine."""
        data = np.empty(rows * row, dtype=np.uint8)
        copy = cu.CUDA_MEMCPY2D()
        copy.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.srcDevice = address
        copy.srcPitch = pitch
        copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost = data.ctypes.data
        copy.dstPitch = copy.WidthInBytes = row
        copy.Height = rows
        with self._context.current():
            call(cu.cuMemcpy2D, copy)
        return data.tobytes()

    def write(self, address: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        with self._context.current():
            call(cu.cuMemcpyHtoD, address, ctypes.addressof(buffer), len(data))
            call(cu.cuCtxSynchronize)

    def fill(self, address: int, word: int, count_bytes: int) -> None:
        """Write 32-bit words from a kernel, where `write` uses the copy engine."""
        with self._context.current():
            call(cu.cuMemsetD32, address, word, count_bytes // 4)
            call(cu.cuCtxSynchronize)

    def close(self) -> None:
        self._context.close()
