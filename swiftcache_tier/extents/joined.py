"""Several address ranges under one base."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.address_range import HostAddressRange
from swiftcache_tier.extents.base import AddressRange, MapOutcome, MapRequest


class Window(NamedTuple):
    """The offsets of a joined range at which one of its parts lies."""

    start_bytes: int
    end_bytes: int
    granularity_bytes: int
    """Of the part: sizes of its extents are multiples of this."""


class JoinedAddressRange(AddressRange):
    """Address ranges for different kinds of memory, addressed from one base.

    The parts lie far apart, wherever the system put them, and offsets between them belong to
    nobody. What it is for: block b is at `base + b * block_bytes` in whichever part, so one
    number names a block and one multiplication finds it. An extent goes into the window of its
    own kind of memory.
    """

    def __init__(self, parts: Mapping[str, AddressRange], granularity_bytes: int) -> None:
        """Join `parts`, which stay open until `close`, by names such as "host" and "cuda".

        The base is a multiple of `granularity_bytes`, which is one of every part's granularity:
        what is aligned as an offset is so as an address.
        """
        self.granularity_bytes = granularity_bytes
        self._parts = dict(parts)
        lowest = min(part.base for part in parts.values())
        self.base = lowest // granularity_bytes * granularity_bytes
        self.size_bytes = max(part.base + part.size_bytes for part in parts.values()) - self.base

    @property
    def names(self) -> list[str]:
        """The kinds of memory that can be mapped."""
        return list(self._parts)

    def window(self, name: str) -> Window:
        """Where a part lies. Raises ValueError for a name that is not there."""
        if name not in self._parts:
            raise ValueError(f"no part {name!r} in a range of {', '.join(self._parts)}")
        part = self._parts[name]
        start = part.base - self.base
        return Window(start, start + part.size_bytes, part.granularity_bytes)

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        part, inside = self._part_at(offset)
        part.map(inside, descriptor, size_bytes)

    def map_each(self, requests: Iterable[MapRequest]) -> MapOutcome:
        """See `AddressRange.map_each`. All of them lie in the part where the first does."""
        rest = iter(requests)
        first = next(rest, None)
        if first is None:
            return MapOutcome(0, None)
        part, inside = self._part_at(first.offset)
        shift = inside - first.offset
        return part.map_each(
            request._replace(offset=request.offset + shift) for request in chain([first], rest)
        )

    def unmap(self, offset: int, size_bytes: int) -> None:
        part, inside = self._part_at(offset)
        part.unmap(inside, size_bytes)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def _part_at(self, offset: int) -> tuple[AddressRange, int]:
        for part in self._parts.values():
            inside = self.base + offset - part.base
            if 0 <= inside < part.size_bytes:
                return part, inside
        raise ValueError(f"offset {offset} of the joined range lies in none of its parts")


def receiver_ordinal(device: str) -> int | None:
    """N of the device "cuda:N" that a receiver computes on; None for "cpu".

    Raises SwiftCacheError for anything else.
    """
    if device == "cpu":
        return None
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise SwiftCacheError(f"no receiver on device {device!r}: expected cpu, cuda:0, cuda:1 ...")
    return int(number)


def address_range_for(device: str, size_bytes: int) -> JoinedAddressRange:
    """Addresses for what a receiver that computes on `device`, "cpu" or "cuda:N", can be lent.

    `size_bytes` are reserved for each kind of memory: "host", and on a GPU "cuda", whose memory
    may lie on any GPU in reach. Raises SwiftCacheError when the system refuses.
    """
    ordinal = receiver_ordinal(device)
    if ordinal is None:
        return JoinedAddressRange({"host": HostAddressRange(size_bytes)}, mmap.PAGESIZE)
    # Load CUDA's bindings, which a receiver on a CPU need not have.
    from swiftcache_tier.cuda_driver import device_uuid
    from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
    from swiftcache_tier.extents.pinned import PinnedHostAddressRange
    from swiftcache_tier.topology import find_gpu, load_nvml

    gpu = find_gpu(device_uuid(ordinal), load_nvml())
    with ExitStack() as undo:
        host = PinnedHostAddressRange(size_bytes, ordinal, gpu.numa_node if gpu else None)
        undo.callback(host.close)
        cuda = CudaAddressRange(size_bytes, ordinal)
        undo.pop_all()
    return JoinedAddressRange({"host": host, "cuda": cuda}, cuda.granularity_bytes)
