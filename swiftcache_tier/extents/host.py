"""Host memory as extents: sealed memfds."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import libc
from swiftcache_tier.extents.base import Arena, Extent
from swiftcache_tier.memory import available_host_bytes
from swiftcache_tier.sizes import format_size

# Without the first two a peer could truncate the file, and every access of the others would be a
# SIGBUS; the third stops it from adding a seal against writing.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x10
_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system
_SEALS_AGAINST_WRITING = fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE


class HostArena(Arena):
    """Extents of host memory.

    The memory is taken from the system page by page as it is first written, and is charged to the
    control group of the process that writes it: usually the receiver.
    """

    device = "host"
    granularity_bytes = mmap.PAGESIZE

    def available_bytes(self) -> int:
        return available_host_bytes()

    def create(self, size_bytes: int) -> HostExtent:
        if size_bytes <= 0 or size_bytes % self.granularity_bytes:
            raise ValueError(
                f"extent of {size_bytes} bytes: must be a positive multiple of "
                f"{self.granularity_bytes}"
            )
        try:
            return HostExtent(size_bytes)
        except OSError as error:
            hint = "raise the limit on open files (ulimit -n) or use larger extents"
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                hint = "free some host memory"
            raise SwiftCacheError(
                f"no host extent of {format_size(size_bytes)}: {error.strerror}; {hint}"
            ) from error


class HostExtent(Extent):
    """A sealed memfd of fixed size."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor: int | None = _sealed_memfd(size_bytes)

    def share(self) -> int:
        return os.dup(self._open_descriptor())

    def scrub(self) -> None:
        """Punch a hole over the whole file, then go on with a fresh memfd.

        The hole frees the RAM at once, even where a peer that fell silent still has the file
        mapped or kept a descriptor of it. That same peer is why zeros in the old file are not
        enough: it could still read and write whatever the next owner puts there. What it holds is
        a file that nobody else will use.
        """
        old = self._open_descriptor()
        hole = libc.FALLOC_FL_PUNCH_HOLE | libc.FALLOC_FL_KEEP_SIZE
        libc.fallocate(old, hole, 0, self.size_bytes)
        self._descriptor = _sealed_memfd(self.size_bytes)
        os.close(old)

    def taken_bytes(self) -> int:
        """RAM for those pages that were written since the extent was made or scrubbed."""
        return os.fstat(self._open_descriptor()).st_blocks * _STAT_BLOCK_BYTES

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError("the extent is closed")
        return self._descriptor


def check_descriptor(descriptor: int, size_bytes: int) -> None:
    """Raise SwiftCacheError unless `descriptor` is a host extent of exactly `size_bytes`.

    A descriptor comes from another process. Mapping one that its sender can still shrink would let
    the sender kill this process (SIGBUS) at any later access.
    """
    problem = _problem(descriptor, size_bytes)
    if problem is not None:
        raise SwiftCacheError(
            f"descriptor {descriptor} is no host extent of {format_size(size_bytes)}: {problem}; "
            f"expected a writable memfd of that size sealed against shrinking, growing and new "
            f"seals: restart the donor that sent it, in the same version as this process"
        )


def _problem(descriptor: int, size_bytes: int) -> str | None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        # EINVAL: a pipe, a socket, a file on a disk; EBADF: not open.
        return "it is not a memfd" if error.errno == errno.EINVAL else str(error.strerror)
    if seals & _SEALS != _SEALS:
        return "it is not sealed"
    if seals & _SEALS_AGAINST_WRITING:
        return "it is sealed against writing"
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        return "it is not open for reading and writing"
    held_bytes = os.fstat(descriptor).st_size
    if held_bytes != size_bytes:
        return f"it holds {held_bytes} bytes, not {size_bytes}"
    return None


def _sealed_memfd(size_bytes: int) -> int:
    descriptor = os.memfd_create("swiftcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
