"""Where a receiver maps the host extents that it was lent."""

from __future__ import annotations

import mmap

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import libc
from swiftcache_tier.extents.base import AddressRange
from swiftcache_tier.extents.host import check_descriptor
from swiftcache_tier.extents.pieces import Pieces
from swiftcache_tier.sizes import format_size

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class HostAddressRange(AddressRange):
    """An address range for extents of host memory.

    Costs address space only. The kernel keeps one record for each run of mapped or unmapped
    addresses, 65530 to a process by default (`vm.max_map_count`): the limit on mapped extents.
    """

    granularity_bytes = mmap.PAGESIZE

    def __init__(self, size_bytes: int) -> None:
        """Reserve `size_bytes`, a multiple of the page size, that fault when touched.

        Raises SwiftCacheError when the system refuses.
        """
        if size_bytes <= 0 or size_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"address range of {size_bytes} bytes: must be a positive multiple of "
                f"{mmap.PAGESIZE}"
            )
        try:
            self.base = libc.mmap(0, size_bytes, libc.PROT_NONE, _RESERVED, -1)
        except OSError as error:
            raise SwiftCacheError(
                f"cannot reserve {format_size(size_bytes)} of address space: {error.strerror}; "
                f"raise the limit on virtual memory (ulimit -v) or reserve less"
            ) from error
        self.size_bytes = size_bytes
        self._closed = False
        self._pieces = Pieces(size_bytes, self.granularity_bytes)

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """See `AddressRange.map`.

        A child that is forked does not inherit the mapping: it would keep the memory alive, and
        in reach, after this process has ended and the donor has lent it to someone else.
        """
        if self._closed:
            raise ValueError("the address range is closed")
        self._pieces.require_free(offset, size_bytes)
        check_descriptor(descriptor, size_bytes)
        address = self.base + offset
        libc.mmap(address, size_bytes, _READ_WRITE, mmap.MAP_SHARED | libc.MAP_FIXED, descriptor)
        try:
            libc.madvise(address, size_bytes, libc.MADV_DONTFORK)
        except OSError:
            self._reserve_again(offset, size_bytes)
            raise
        self._pieces.add(offset, size_bytes)

    def unmap(self, offset: int, size_bytes: int) -> None:
        pieces = self._pieces.require_mapped(offset, size_bytes)
        self._reserve_again(offset, size_bytes)
        self._pieces.remove(pieces)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the range that are backed by extents now."""
        return self._pieces.mapped_bytes

    def close(self) -> None:
        if not self._closed:
            libc.munmap(self.base, self.size_bytes)
            self._closed = True
            self._pieces.clear()

    def _reserve_again(self, offset: int, size_bytes: int) -> None:
        # One call replaces the pages: with a munmap first, another thread's mmap could take the
        # addresses in between, and a later MAP_FIXED would destroy what it put there.
        flags = _RESERVED | libc.MAP_FIXED
        libc.mmap(self.base + offset, size_bytes, libc.PROT_NONE, flags, -1)
