"""Physical memory of a GPU and the addresses it is mapped at: the driver's virtual memory calls.

A handle counts as one reference to its memory, and so do each mapping and each descriptor, in any
process: the memory is freed with the last of them. All functions raise CudaError.
"""

from __future__ import annotations

import errno
import os
from typing import Any

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import call

WRONG_SIZE_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP)
"""What drivers answer to mapping more or less than all of an allocation: they differ in it."""

_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def granularity_bytes(ordinal: int) -> int:
    """Sizes of allocations on a device, and the addresses of mappings, are multiples of this."""
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(cu.cuMemGetAllocationGranularity, _properties(ordinal), minimum))


def create(ordinal: int, size_bytes: int) -> Any:
    """A handle of new memory, of unknown content. Needs no context."""
    return call(cu.cuMemCreate, size_bytes, _properties(ordinal), 0)


def release(handle: Any) -> None:
    call(cu.cuMemRelease, handle)


def export_descriptor(handle: Any) -> int:
    """A new descriptor (close-on-exec) of the memory; the caller closes it. Needs no context."""
    descriptor = int(call(cu.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0))
    os.set_inheritable(descriptor, False)
    return descriptor


def import_descriptor(descriptor: int) -> Any:
    """A handle of the memory behind a descriptor, which stays the caller's."""
    return call(cu.cuMemImportFromShareableHandle, descriptor, _DESCRIPTOR)


def device_of(handle: Any) -> int | None:
    """Ordinal of the GPU where the memory lies; None if it is not plain memory of one.

    Negative for a GPU that this process does not see.
    """
    properties = call(cu.cuMemGetAllocationPropertiesFromHandle, handle)
    plain = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    on_device = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    if properties.type != plain or properties.location.type != on_device:
        return None
    return int(properties.location.id)


def reserve(size_bytes: int, alignment_bytes: int) -> int:
    """Addresses that fault when touched, until something is mapped there."""
    return int(call(cu.cuMemAddressReserve, size_bytes, alignment_bytes, 0, 0))


def give_back(address: int, size_bytes: int) -> None:
    """Give a whole reservation back; nothing may be mapped in it."""
    call(cu.cuMemAddressFree, address, size_bytes)


def map_at(address: int, size_bytes: int, handle: Any) -> None:
    """Map the memory behind `handle` at reserved addresses, as yet out of reach.

    One of `WRONG_SIZE_ERRNOS` when it is not of `size_bytes`.
    """
    call(cu.cuMemMap, address, size_bytes, 0, handle, 0)


def allow_access(address: int, size_bytes: int, ordinal: int) -> None:
    """Let one device read and write what is mapped there."""
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = ordinal
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    call(cu.cuMemSetAccess, address, size_bytes, [access], 1)


def unmap(address: int, size_bytes: int) -> None:
    """Take out what one `map_at` put in, or several side by side.

    Waits for no kernel that still uses it.
    """
    call(cu.cuMemUnmap, address, size_bytes)


def _properties(ordinal: int) -> Any:
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _DESCRIPTOR
    return properties
