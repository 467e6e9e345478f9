"""Extents: pieces of physical memory that one process lends to another.

The donor side is an `Arena` that makes `Extent`s; the receiver side is an `AddressRange` that maps
them. Between the two travels a file descriptor and nothing else, so every kind of memory has the
same life: create, share, map, unmap, scrub.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError


def describe_device(device: str, uuid: str | None, model: str | None) -> str:
    """A device for people to read: "host", or "cuda:1 (NVIDIA H200, GPU-b9255ade)"."""
    if uuid is None:
        return device
    short = uuid[: len("GPU-") + 8]  # enough to tell the GPUs of a machine apart
    return f"{device} ({model}, {short})" if model else f"{device} ({short})"


class Extent(ABC):
    """One piece of physical memory, held by the donor. Used by one thread at a time.

    Memory that a receiver has mapped outlives both `close` and the end of the donor's process: it
    returns to the system when the last mapping of it is gone.
    """

    size_bytes: int

    @abstractmethod
    def share(self) -> int:
        """A new descriptor (close-on-exec) of the present memory; the caller closes it.

        Raises OSError (EMFILE) when the process may open no more files.
        """

    @abstractmethod
    def scrub(self) -> None:
        """Make the extent read as zeros, out of reach of whoever held it before.

        Called at each change of owner, before the extent is offered again. On an OSError the
        extent is not clean and must not be offered; the call may be repeated.
        """

    def taken_bytes(self) -> int:
        """Memory of the device that the extent takes up now: all of it, from the start."""
        return self.size_bytes

    @abstractmethod
    def close(self) -> None:
        """Give the memory up. May be repeated; no other method may follow."""


class Arena(ABC):
    """A kind of memory on one device, from which a donor makes its extents."""

    device: str
    """As in `--device`: "host" or "cuda:N"."""

    uuid: str | None = None
    """Of the GPU, the same in every process, where "cuda:N" is not; None for host memory."""

    model: str | None = None
    """What the GPU calls itself; None for host memory, and where the system does not tell."""

    granularity_bytes: int
    """Extent sizes, and the offsets where they are mapped, are multiples of this."""

    scrub_bytes: int = 0
    """Memory of the device that scrubbing takes for a while, beside the extents."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Memory that could be lent now without starving what already runs on the device."""

    @abstractmethod
    def create(self, size_bytes: int) -> Extent:
        """A new extent that reads as zeros.

        Raises ValueError unless `size_bytes` is a positive multiple of `granularity_bytes`, and
        SwiftCacheError when the system refuses.
        """


class MapRequest(NamedTuple):
    """One extent that is to be mapped, as `AddressRange.map` takes it."""

    offset: int
    descriptor: int
    size_bytes: int


class MapOutcome(NamedTuple):
    """How far `AddressRange.map_each` came."""

    mapped: int
    """So many of what was asked, from the first, can be used."""
    problem: SwiftCacheError | OSError | None
    """Why the next could not be mapped; nothing after it is mapped. None if all are."""


class AddressRange(ABC):
    """A contiguous range of a receiver's addresses, parts of which are backed by extents.

    `base` never changes, so an address handed out stays valid for as long as the extent behind it
    is mapped. Used by one thread at a time.
    """

    base: int
    """Address of offset 0."""

    size_bytes: int

    granularity_bytes: int
    """Extent sizes, and the offsets where they are mapped, are multiples of this."""

    @abstractmethod
    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """Put the whole extent behind `descriptor` at `offset`, readable and writable.

        The descriptor is checked first, stays the caller's and may be closed at once. Raises
        SwiftCacheError for a descriptor that is no extent of `size_bytes`, ValueError for a place
        outside the range or already mapped, OSError when the system refuses (nothing is mapped).
        """

    def map_each(self, requests: Iterable[MapRequest]) -> MapOutcome:
        """Map one after the other, as `map` does, until one cannot be mapped.

        Each is drawn from `requests` just before it is mapped, so a generator decides how many
        there are. Of GPU memory several cost far less together than one by one; none of them can
        be used before the return. Raises ValueError as `map` does, and OSError when the system
        refuses to take out again what cannot be used; `close` takes out what is mapped then.
        """
        mapped = 0
        for request in requests:
            try:
                self.map(*request)
            except (SwiftCacheError, OSError) as error:
                return MapOutcome(mapped, error)
            mapped += 1
        return MapOutcome(mapped, None)

    @abstractmethod
    def unmap(self, offset: int, size_bytes: int) -> None:
        """Take out what one `map` put in, or several side by side; the addresses stay reserved and
        fault when touched.

        Nothing may still read or write them. Raises ValueError unless exactly these bytes are
        whole mapped pieces, OSError when the system refuses (all of them stay mapped).
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap everything and give the addresses up. May be repeated; nothing else may follow."""
