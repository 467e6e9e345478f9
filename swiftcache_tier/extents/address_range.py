"""Where a receiver maps the host extents that it was lent."""

from __future__ import annotations

import mmap
from bisect import bisect_left

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import libc
from swiftcache_tier.extents.base import AddressRange
from swiftcache_tier.extents.host import check_descriptor
from swiftcache_tier.sizes import format_size

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | libc.MAP_NORESERVE
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class HostAddressRange(AddressRange):
    """An address range for extents of host memory.

    Costs address space only. The kernel keeps one record for each run of mapped or unmapped
    addresses, 65530 to a process by default (`vm.max_map_count`): the limit on mapped extents.
    """

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
        self._size_at: dict[int, int] = {}
        self._offsets: list[int] = []  # keys of _size_at in order

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """See `AddressRange.map`.

        A child that is forked does not inherit the mapping: it would keep the memory alive, and
        in reach, after this process has ended and the donor has lent it to someone else.
        """
        self._check_place(offset, size_bytes)
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] < offset + size_bytes:
            raise ValueError(f"offset {self._offsets[index]} of the range is already mapped")
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._size_at[before] > offset:
                raise ValueError(f"offset {offset} of the range is already mapped")
        check_descriptor(descriptor, size_bytes)
        address = self.base + offset
        libc.mmap(address, size_bytes, _READ_WRITE, mmap.MAP_SHARED | libc.MAP_FIXED, descriptor)
        try:
            libc.madvise(address, size_bytes, libc.MADV_DONTFORK)
        except OSError:
            self._reserve_again(offset, size_bytes)
            raise
        self._size_at[offset] = size_bytes
        self._offsets.insert(index, offset)

    def unmap(self, offset: int, size_bytes: int) -> None:
        if self._size_at.get(offset) != size_bytes:
            raise ValueError(f"no extent of {size_bytes} bytes is mapped at offset {offset}")
        self._reserve_again(offset, size_bytes)
        del self._size_at[offset]
        del self._offsets[bisect_left(self._offsets, offset)]

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the range that are backed by extents now."""
        return sum(self._size_at.values())

    def close(self) -> None:
        if not self._closed:
            libc.munmap(self.base, self.size_bytes)
            self._closed = True
            self._size_at.clear()
            self._offsets.clear()

    def _check_place(self, offset: int, size_bytes: int) -> None:
        if self._closed:
            raise ValueError("the address range is closed")
        if offset % mmap.PAGESIZE or size_bytes % mmap.PAGESIZE:
            raise ValueError(f"offset {offset}, {size_bytes} bytes: not whole pages")
        if offset < 0 or size_bytes <= 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"offset {offset}, {size_bytes} bytes: outside a range of {self.size_bytes} bytes"
            )

    def _reserve_again(self, offset: int, size_bytes: int) -> None:
        # One call replaces the pages: with a munmap first, another thread's mmap could take the
        # addresses in between, and a later MAP_FIXED would destroy what it put there.
        flags = _RESERVED | libc.MAP_FIXED
        libc.mmap(self.base + offset, size_bytes, libc.PROT_NONE, flags, -1)
