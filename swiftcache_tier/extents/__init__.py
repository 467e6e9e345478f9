"""Lent memory: what a donor makes, how it travels, where a receiver maps it."""

from __future__ import annotations

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.address_range import HostAddressRange
from swiftcache_tier.extents.base import (
    AddressRange,
    Arena,
    Extent,
    MapOutcome,
    MapRequest,
    describe_device,
)
from swiftcache_tier.extents.host import HostArena, check_descriptor
from swiftcache_tier.extents.joined import (
    JoinedAddressRange,
    Window,
    address_range_for,
    receiver_ordinal,
)
from swiftcache_tier.extents.passing import FDS_PER_RECORD_MAX, Record, recv_fds, send_fds

__all__ = [
    "FDS_PER_RECORD_MAX",
    "AddressRange",
    "Arena",
    "Extent",
    "HostAddressRange",
    "HostArena",
    "JoinedAddressRange",
    "MapOutcome",
    "MapRequest",
    "Record",
    "Window",
    "address_range_for",
    "arena_for",
    "check_descriptor",
    "describe_device",
    "receiver_ordinal",
    "recv_fds",
    "send_fds",
]


def arena_for(device: str) -> Arena:
    """The arena of a `--device`. Raises SwiftCacheError when there is none for it."""
    if device == HostArena.device:
        return HostArena()
    kind, _, ordinal = device.partition(":")
    if kind == "cuda" and ordinal.isdecimal():
        # Loads CUDA's bindings, which a donor of host memory need not wait for.
        from swiftcache_tier.extents.cuda import CudaArena

        return CudaArena(int(ordinal))
    raise SwiftCacheError(
        f"no memory can be lent from device {device!r}: expected host, or cuda:0, cuda:1 and so on"
    )
