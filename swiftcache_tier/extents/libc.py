"""The calls of libc that Python does not offer, with errno turned into OSError."""

from __future__ import annotations

import ctypes
import os

FALLOC_FL_KEEP_SIZE = 0x01
FALLOC_FL_PUNCH_HOLE = 0x02
MADV_DONTFORK = 10
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)

_MAP_FAILED = ctypes.c_void_p(-1).value


def mmap(address: int, size_bytes: int, protection: int, flags: int, descriptor: int) -> int:
    """Map `descriptor` from its start (-1: no file) and return the address. Raises OSError."""
    mapped = _libc.mmap(address or None, size_bytes, protection, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _os_error("mmap")
    return int(mapped)


def munmap(address: int, size_bytes: int) -> None:
    """Give a range of addresses back. Raises OSError."""
    if _libc.munmap(address, size_bytes) != 0:
        raise _os_error("munmap")


def madvise(address: int, size_bytes: int, advice: int) -> None:
    """Advise the kernel about a range of addresses. Raises OSError."""
    if _libc.madvise(address, size_bytes, advice) != 0:
        raise _os_error("madvise")


def fallocate(descriptor: int, mode: int, offset: int, size_bytes: int) -> None:
    """Allocate or, by `mode`, release a part of a file. Raises OSError."""
    if _libc.fallocate(descriptor, mode, offset, size_bytes) != 0:
        raise _os_error("fallocate")


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
