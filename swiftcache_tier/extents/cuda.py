"""Memory of a GPU as extents: allocations of the CUDA driver that travel as descriptors."""

from __future__ import annotations

import errno
import functools
import logging
from contextlib import closing
from typing import Any

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import CudaError, PrimaryContext, call, device, device_uuid
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import device_memory
from swiftcache_tier.extents.base import Arena, Extent
from swiftcache_tier.extents.zero_fill import ZeroFill
from swiftcache_tier.sizes import format_size
from swiftcache_tier.topology.gpus import find_gpu, free_memory_bytes
from swiftcache_tier.topology.nvml import load_nvml

logger = logging.getLogger(__name__)

SPARE_BYTES = 1 << 30
"""Left free on a GPU that lends: room for a context while extents are zeroed, for the fresh memory
of an extent whose old memory is still held, and for what else runs there."""


class CudaArena(Arena):
    """Extents of the memory of one GPU.

    The memory is taken at once. Extents outlive the arena's context, which exists only while
    something is being zeroed (see `ZeroFill`).
    """

    scrub_bytes = 526 << 20  # a context, as measured on an H200

    def __init__(self, ordinal: int, *, context_idle_s: float | None = 2.0) -> None:
        """`context_idle_s`: how long the context is kept after zeroing; None keeps it.

        Raises SwiftCacheError for a device that is not there or cannot share memory.
        """
        cuda_device = device(ordinal)
        self.device = f"cuda:{ordinal}"
        self.uuid: str = device_uuid(ordinal)
        attributes = cu.CUdevice_attribute
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ):
            if not call(cu.cuDeviceGetAttribute, attribute, cuda_device):
                raise SwiftCacheError(
                    f"device {self.device!r} cannot lend memory: its driver does not share memory "
                    f"by descriptor ({attribute.name} is 0); use host memory"
                )
        gpu = find_gpu(self.uuid, load_nvml())
        self.model = None if gpu is None else gpu.name
        self.granularity_bytes = device_memory.granularity_bytes(ordinal)
        self._ordinal = ordinal
        self._zero_fill = ZeroFill(ordinal, context_idle_s)

    def available_bytes(self) -> int:
        """Free memory of the GPU, less `SPARE_BYTES`."""
        return max(0, self._free_bytes() - SPARE_BYTES)

    def create(self, size_bytes: int) -> CudaExtent:
        if size_bytes <= 0 or size_bytes % self.granularity_bytes:
            raise ValueError(
                f"extent of {size_bytes} bytes: must be a positive multiple of "
                f"{self.granularity_bytes}"
            )
        try:
            return CudaExtent(self._ordinal, size_bytes, self._zero_fill)
        except CudaError as error:
            problem, hint = error.strerror, "look for the cause in the kernel's log (dmesg)"
            if error.errno == errno.ENOMEM:
                problem = f"{format_size(self._free_bytes())} are free there"
                hint = "lend less or free some"
            raise SwiftCacheError(
                f"no extent of {format_size(size_bytes)} on {self.device}: {problem}; {hint}"
            ) from error

    def _free_bytes(self) -> int:
        free_bytes = free_memory_bytes(self.uuid, load_nvml())
        if free_bytes is not None:
            return free_bytes
        # Without NVML only a context can tell, and it counts itself as used.
        try:
            with closing(PrimaryContext(self._ordinal)) as context, context.current():
                return int(call(cu.cuMemGetInfo))
        except CudaError:
            return 0  # not even room for a context


class CudaExtent(Extent):
    """Memory of a GPU that nothing in this process has mapped."""

    def __init__(self, ordinal: int, size_bytes: int, zero_fill: ZeroFill) -> None:
        """Raises CudaError."""
        self.size_bytes = size_bytes
        self._ordinal = ordinal
        self._zero_fill = zero_fill
        self._handle: Any = self._fresh()

    def share(self) -> int:
        return device_memory.export_descriptor(self._open_handle())

    def scrub(self) -> None:
        """Go on with fresh memory, zeroed, and let go of the old.

        As with host memory, zeros in the old are not enough: whoever kept a descriptor or a
        mapping of it could read and write what the next owner puts there. The fresh memory is
        zeroed because the driver clears pages between processes, not within one.

        Both exist for a moment. If the device has no room for that, the old memory is zeroed in
        place and used again: out of reach of a holder that kept to the protocol, as all do that
        answered for their extents or whose process has ended, and in reach of one that kept a
        descriptor aside. `SPARE_BYTES` makes that rare.
        """
        old = self._open_handle()
        try:
            fresh = self._fresh()
        except CudaError as error:
            if error.errno != errno.ENOMEM:
                raise
            _warn_of_zeros_in_place(self._ordinal, self.size_bytes)
            self._zero_fill.fill(old, self.size_bytes)
            return
        self._handle = fresh
        device_memory.release(old)

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            device_memory.release(handle)

    def _fresh(self) -> Any:
        handle = device_memory.create(self._ordinal, self.size_bytes)
        try:
            self._zero_fill.fill(handle, self.size_bytes)
        except BaseException:
            device_memory.release(handle)
            raise
        return handle

    def _open_handle(self) -> Any:
        if self._handle is None:
            raise ValueError("the extent is closed")
        return self._handle


@functools.cache  # once, not for each of a thousand extents
def _warn_of_zeros_in_place(ordinal: int, size_bytes: int) -> None:
    logger.warning(
        "cuda:%d has no room for another %s: extents are zeroed in place, where a process that "
        "kept a descriptor of one can still reach it; free %s there",
        ordinal,
        format_size(size_bytes),
        format_size(SPARE_BYTES),
    )
