"""Where a receiver on a GPU maps the host extents that it was lent."""

from __future__ import annotations

import logging

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import PrimaryContext, call
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.address_range import HostAddressRange
from swiftcache_tier.topology.numa import prefer_numa_node

logger = logging.getLogger(__name__)

_FLAGS = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP


class PinnedHostAddressRange(HostAddressRange):
    """An address range for extents of host memory that GPUs read and write at the same addresses.

    Mapping an extent takes all its RAM at once and locks it there: some 0.65 s for each GiB that
    was not in use before, 0.2 s where the RAM is there. Keeps the process's primary context on the
    GPU.
    """

    def __init__(self, size_bytes: int, ordinal: int, numa_node: int | None = None) -> None:
        """Reserve as `HostAddressRange` does, for the GPU "cuda:N".

        `numa_node`: where to put the memory if there is room, the GPU's own; None leaves it to
        the kernel. Raises SwiftCacheError also when there is no such GPU.
        """
        self._context = PrimaryContext(ordinal)
        try:
            super().__init__(size_bytes)
        except BaseException:
            self._context.close()
            raise
        self._ordinal = ordinal
        self._numa_node = numa_node
        self._pinned: dict[int, int] = {}  # size by offset

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        """See `AddressRange.map`. Any thread may call, whatever context is current there."""
        super().map(offset, descriptor, size_bytes)
        try:
            self._place(offset, size_bytes)
            self._pin(offset, size_bytes)
        except BaseException:
            super().unmap(offset, size_bytes)
            raise
        self._pinned[offset] = size_bytes

    def unmap(self, offset: int, size_bytes: int) -> None:
        for piece in self._pieces.require_mapped(offset, size_bytes):
            if piece in self._pinned:  # not where mapping it has failed
                self._unpin(piece)
        super().unmap(offset, size_bytes)

    def close(self) -> None:
        for offset in list(self._pinned):
            self._unpin(offset)
        super().close()
        self._context.close()

    def _place(self, offset: int, size_bytes: int) -> None:
        """Prefer a node for the pages that are not there yet; the policy stays with the file."""
        if self._numa_node is None:
            return
        try:
            prefer_numa_node(self.base + offset, size_bytes, self._numa_node)
        except OSError as error:  # containers may forbid the call
            logger.info("host extents are placed by the kernel: %s", error)
            self._numa_node = None

    def _pin(self, offset: int, size_bytes: int) -> None:
        address = self.base + offset
        with self._context.current():
            call(cu.cuMemHostRegister, address, size_bytes, _FLAGS)
            try:
                seen_by_gpu = int(call(cu.cuMemHostGetDevicePointer, address, 0))
                if seen_by_gpu != address:
                    raise SwiftCacheError(
                        f"a host extent at {address:#x} has the address {seen_by_gpu:#x} on "
                        f"cuda:{self._ordinal}: expected one address for both; hide GPUs without "
                        f"unified addressing (CUDA_VISIBLE_DEVICES)"
                    )
            except BaseException:
                call(cu.cuMemHostUnregister, address)
                raise

    def _unpin(self, offset: int) -> None:
        with self._context.current():
            call(cu.cuMemHostUnregister, self.base + offset)
        del self._pinned[offset]
