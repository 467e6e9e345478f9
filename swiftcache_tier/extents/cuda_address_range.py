"""Where a receiver maps the GPU extents that it was lent."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swiftcache_tier.cuda_driver import CudaError, PrimaryContext, can_access_peer
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import device_memory
from swiftcache_tier.extents.base import AddressRange
from swiftcache_tier.extents.pieces import Pieces
from swiftcache_tier.sizes import format_size


class CudaAddressRange(AddressRange):
    """An address range for extents of GPU memory, its own or a peer's.

    Only kernels and copies of the receiver's GPU can use the addresses; to the CPU they fault.
    Keeps the process's primary context on that GPU, in which the addresses live. Any thread may
    call, whatever context is current there; one at a time.
    """

    def __init__(self, size_bytes: int, ordinal: int) -> None:
        """Reserve `size_bytes`, a multiple of the granularity (2 MiB), for the GPU "cuda:N".

        Raises SwiftCacheError when there is no such GPU, or no room for the reservation.
        """
        self._ordinal = ordinal
        self._context = PrimaryContext(ordinal)
        self._closed = False
        try:
            with self._context.current():
                self.granularity_bytes = device_memory.granularity_bytes(ordinal)
                if size_bytes <= 0 or size_bytes % self.granularity_bytes:
                    raise ValueError(
                        f"address range of {size_bytes} bytes: must be a positive multiple of "
                        f"{self.granularity_bytes}"
                    )
                self.base = _reserve(ordinal, size_bytes, self.granularity_bytes)
        except BaseException:
            self._context.close()
            raise
        self.size_bytes = size_bytes
        self._pieces = Pieces(size_bytes, self.granularity_bytes)

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """See `AddressRange.map`.

        The driver does not tell how large the memory behind a descriptor is; it refuses to map
        more or less of it than there is, which is raised as SwiftCacheError.
        """
        if self._closed:
            raise ValueError("the address range is closed")
        self._pieces.require_free(offset, size_bytes)
        with self._context.current(), self._imported(descriptor, size_bytes) as handle:
            self._map(offset, size_bytes, handle, descriptor)
        self._pieces.add(offset, size_bytes)

    def unmap(self, offset: int, size_bytes: int) -> None:
        pieces = self._pieces.require_mapped(offset, size_bytes)
        with self._context.current():
            device_memory.unmap(self.base + offset, size_bytes)
        self._pieces.remove(pieces)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the range that are backed by extents now."""
        return self._pieces.mapped_bytes

    def close(self) -> None:
        if self._closed:
            return
        for offset, size_bytes in self._pieces:
            self.unmap(offset, size_bytes)
        with self._context.current():
            device_memory.give_back(self.base, self.size_bytes)
        self._closed = True
        self._context.close()

    @contextmanager
    def _imported(self, descriptor: int, size_bytes: int) -> Iterator[Any]:
        """A handle of what is behind `descriptor`: GPU memory that this GPU can reach.

        A mapping keeps the memory alive without the handle, so it is released at the end.
        """
        _require_no_plain_file(descriptor, size_bytes)
        try:
            handle = device_memory.import_descriptor(descriptor)
        except CudaError as error:
            if error.errno == errno.ENOMEM:
                raise
            problem = f"the driver does not know it ({error.strerror})"
            raise _refusal(descriptor, size_bytes, problem) from error
        try:
            donor = device_memory.device_of(handle)
            if donor is None:
                raise _refusal(descriptor, size_bytes, "it is not the memory of a GPU")
            if donor < 0:
                problem = "it lies on a GPU that CUDA_VISIBLE_DEVICES hides from this process"
                raise _refusal(descriptor, size_bytes, problem)
            if not can_access_peer(self._ordinal, donor):
                raise SwiftCacheError(
                    f"cuda:{self._ordinal} cannot address the memory of cuda:{donor}, where an "
                    f"extent of {format_size(size_bytes)} lies: there is no peer access between "
                    f"them; lend host memory instead"
                )
            yield handle
        finally:
            device_memory.release(handle)

    def _map(self, offset: int, size_bytes: int, handle: Any, descriptor: int) -> None:
        """Map the memory behind `handle`, which may be mapped elsewhere as well."""
        address = self.base + offset
        try:
            device_memory.map_at(address, size_bytes, handle)
        except CudaError as error:
            if error.errno not in device_memory.WRONG_SIZE_ERRNOS:
                raise
            problem = f"it is of another size ({error.strerror})"
            raise _refusal(descriptor, size_bytes, problem) from error
        try:
            device_memory.allow_access(address, size_bytes, self._ordinal)
        except BaseException:
            device_memory.unmap(address, size_bytes)
            raise


def _reserve(ordinal: int, size_bytes: int, granularity_bytes: int) -> int:
    try:
        return device_memory.reserve(size_bytes, granularity_bytes)
    except CudaError as error:
        raise SwiftCacheError(
            f"cannot reserve {format_size(size_bytes)} of address space for cuda:{ordinal}: "
            f"{error.strerror}; raise the limit on virtual memory (ulimit -v) or reserve less"
        ) from error


def _require_no_plain_file(descriptor: int, size_bytes: int) -> None:
    """Keep from the driver what cannot be one of its descriptors."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError as error:
        raise _refusal(descriptor, size_bytes, str(error.strerror)) from error
    for is_kind, kind in (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file or host memory"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISBLK, "a block device"),
    ):
        if is_kind(mode):
            raise _refusal(descriptor, size_bytes, f"it is {kind}")


def _refusal(descriptor: int, size_bytes: int, problem: str) -> SwiftCacheError:
    return SwiftCacheError(
        f"descriptor {descriptor} is no GPU extent of {format_size(size_bytes)}: {problem}; "
        f"expected shareable memory of that size on a GPU that this process sees (see "
        f"CUDA_VISIBLE_DEVICES); restart the donor that sent it in the same version as this process"
    )
