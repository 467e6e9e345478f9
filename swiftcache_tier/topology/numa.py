"""Host memory and CPUs near a device, on machines with several NUMA nodes."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_SYSFS = Path("/sys")

# libc has no wrapper for mbind, and libnuma, which has one, is seldom installed.
_MBIND_NUMBER = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def numa_nodes(sysfs: Path = _SYSFS) -> list[int]:
    """The nodes that have CPUs; one or none on a machine where nodes do not matter."""
    return _numbers(sysfs / "devices/system/node/has_cpu")


def pin_thread_to_numa_node(node: int | None, sysfs: Path = _SYSFS) -> bool:
    """Keep the calling thread, and those it starts, on the CPUs of `node`.

    Only CPUs it may use already count. Does nothing and returns False if the node is not known,
    the machine has no other, or none of its CPUs may be used; nor if the system refuses.
    """
    if node is None or len(numa_nodes(sysfs)) < 2:
        return False
    cpus = os.sched_getaffinity(0)
    near = cpus.intersection(_numbers(sysfs / f"devices/system/node/node{node}/cpulist"))
    if not near:
        return False
    try:
        os.sched_setaffinity(0, near)
    except OSError:  # containers may forbid the call
        return False
    return True


def prefer_numa_node(address: int, size_bytes: int, node: int, sysfs: Path = _SYSFS) -> None:
    """Take the RAM behind a mapping from `node` while it has some; elsewhere after that.

    Counts for pages that nobody has touched yet; for shared memory the kernel keeps the policy
    with the file. Does nothing on a machine of one node. Raises OSError when the system refuses.
    """
    if len(numa_nodes(sysfs)) < 2 or _MBIND_NUMBER is None:
        return
    word_bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // word_bits + 1))()
    mask[node // word_bits] = 1 << node % word_bits
    result = _libc.syscall(
        ctypes.c_long(_MBIND_NUMBER),
        ctypes.c_void_p(address),
        ctypes.c_ulong(size_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * word_bits + 1),  # the kernel counts one bit more
        ctypes.c_uint(0),
    )
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mbind: {os.strerror(number)}")


def _numbers(path: Path) -> list[int]:
    """The numbers in one of the kernel's lists, such as "0-3,8"; none if it is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
