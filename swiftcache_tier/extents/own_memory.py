"""Memory of the device that a server computes on, and where it maps it itself."""

from __future__ import annotations

from swiftcache_tier.extents.address_range import HostAddressRange
from swiftcache_tier.extents.base import AddressRange, Arena
from swiftcache_tier.extents.host import HostArena


def arena_and_range(device: str, size_bytes: int) -> tuple[Arena, AddressRange]:
    """An arena of `device`, "cpu" or "cuda:N", and `size_bytes` of addresses for its extents."""
    if device == "cpu":
        return HostArena(), HostAddressRange(size_bytes)
    # Loads CUDA's bindings, which a server on a CPU need not have.
    from swiftcache_tier.extents.cuda import CudaArena
    from swiftcache_tier.extents.cuda_address_range import CudaAddressRange

    ordinal = ordinal_of_device(device)
    return CudaArena(ordinal, context_idle_s=None), CudaAddressRange(size_bytes, ordinal)


def ordinal_of_device(device: str) -> int:
    """N of "cuda:N"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)
