"""Where a receiver maps the GPU extents that it was lent."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swiftcache_tier.cuda_driver import CudaError, PrimaryContext, can_access_peer
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import device_memory
from swiftcache_tier.extents.base import AddressRange, MapOutcome, MapRequest
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
        self._in_reach: set[int] = set()
        """GPUs whose memory this GPU can address, of those that were asked about."""

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """See `AddressRange.map`.

        The driver does not tell how large the memory behind a descriptor is; it refuses to map
        more or less of it than there is, which is raised as SwiftCacheError.
        """
        outcome = self.map_each([MapRequest(offset, descriptor, size_bytes)])
        if outcome.problem is not None:
            raise outcome.problem

    def map_each(self, requests: Iterable[MapRequest]) -> MapOutcome:
        """See `AddressRange.map_each`.

        With one context for all of them, and access given once to each run of neighbours: every
        call of the driver gives the interpreter away and may have to wait for it.
        """
        if self._closed:
            raise ValueError("the address range is closed")
        placed: list[MapRequest] = []
        usable = 0
        problem: SwiftCacheError | OSError | None = None
        with self._context.current():
            try:
                for request in requests:
                    try:
                        self._place(request)
                    except (SwiftCacheError, OSError) as error:
                        problem = error
                        break
                    placed.append(request)
                for run in _runs(placed):
                    opened, refusal = self._open(run)
                    usable += opened
                    if refusal is not None:
                        problem = refusal
                        break
            finally:
                for request in placed[usable:]:
                    self._take_out(request)
        return MapOutcome(usable, problem)

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
            if not self._reaches(donor):
                raise SwiftCacheError(
                    f"cuda:{self._ordinal} cannot address the memory of cuda:{donor}, where an "
                    f"extent of {format_size(size_bytes)} lies: there is no peer access between "
                    f"them; lend host memory instead"
                )
            yield handle
        finally:
            device_memory.release(handle)

    def _reaches(self, donor: int) -> bool:
        # What the driver says of two GPUs stays so, and asking takes it several calls.
        if donor not in self._in_reach and can_access_peer(self._ordinal, donor):
            self._in_reach.add(donor)
        return donor in self._in_reach

    def _place(self, request: MapRequest) -> None:
        """Map what may be mapped elsewhere as well; it is out of reach until `_open`."""
        offset, descriptor, size_bytes = request
        self._pieces.require_free(offset, size_bytes)
        with self._imported(descriptor, size_bytes) as handle:
            try:
                device_memory.map_at(self.base + offset, size_bytes, handle)
            except CudaError as error:
                if error.errno not in device_memory.WRONG_SIZE_ERRNOS:
                    raise
                problem = f"it is of another size ({error.strerror})"
                raise _refusal(descriptor, size_bytes, problem) from error
        self._pieces.add(offset, size_bytes)

    def _open(self, run: Sequence[MapRequest]) -> tuple[int, CudaError | None]:
        """Give this GPU access to neighbours; returns to how many, and why not to the next."""
        address = self.base + run[0].offset
        try:
            device_memory.allow_access(address, sum(r.size_bytes for r in run), self._ordinal)
        except CudaError as error:
            if len(run) == 1:
                return 0, error
        else:
            return len(run), None
        for opened, request in enumerate(run):
            _, refusal = self._open([request])
            if refusal is not None:
                return opened, refusal
        return len(run), None

    def _take_out(self, request: MapRequest) -> None:
        device_memory.unmap(self.base + request.offset, request.size_bytes)
        self._pieces.remove([request.offset])


def _runs(requests: Iterable[MapRequest]) -> Iterator[list[MapRequest]]:
    """Cut `requests` where the next does not begin at the end of the one before."""
    run: list[MapRequest] = []
    for request in requests:
        if run and request.offset != run[-1].offset + run[-1].size_bytes:
            yield run
            run = []
        run.append(request)
    if run:
        yield run


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
