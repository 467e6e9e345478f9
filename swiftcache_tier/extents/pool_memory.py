"""The memory of an engine's own KV pool, made of extents that can be lent one by one."""

from __future__ import annotations

import os
from contextlib import ExitStack

from swiftcache_tier.extents.base import Extent
from swiftcache_tier.extents.host import HostArena
from swiftcache_tier.extents.own_memory import arena_and_range, ordinal_of_device


class PoolMemory:
    """One range of addresses that its owner uses like any memory, and shares extent by extent.

    All extents stay mapped here, also while they are lent: whoever was handed a descriptor can
    reach that extent, and no other, until it has closed and unmapped it. Nothing revokes it. A
    child that is forked does not inherit the mapping of host memory.
    """

    def __init__(self, device: str, extent_bytes: int, extents: int) -> None:
        """Memory of `device` ("cpu" or "cuda:N"), taken at once on a GPU, that reads as zeros.

        Raises SwiftCacheError when the system refuses, ValueError unless `extent_bytes` is a
        multiple of `granularity_bytes(device)`.
        """
        self.extent_bytes = extent_bytes
        self.extents = extents
        self.size_bytes = extents * extent_bytes
        self._extents: list[Extent] = []
        self._shared: dict[int, int] = {}
        """Descriptors of extents that were shared, by slot."""
        with ExitStack() as on_failure:
            arena, self._range = arena_and_range(device, self.size_bytes)
            on_failure.callback(self.close)
            self.arena = arena
            for slot in range(extents):
                self._extents.append(arena.create(extent_bytes))
                self._map(slot)
            on_failure.pop_all()

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return self._range.base

    @property
    def open_files(self) -> int:
        """Descriptors that are open once every extent was shared."""
        # An extent of host memory is an open file itself.
        return self.extents * (2 if isinstance(self.arena, HostArena) else 1)

    def share(self, slot: int) -> int:
        """A descriptor of the extent for a receiver; the caller closes it. Raises OSError.

        A duplicate: another is kept open from the first call on, one for each extent that was ever
        shared, for a driver takes far longer to make a descriptor and to close the last of one.
        """
        if slot not in self._shared:
            self._shared[slot] = self._extents[slot].share()
        return os.dup(self._shared[slot])

    def close(self) -> None:
        """Unmap everything; what receivers have mapped lives on. May be repeated."""
        self._range.close()
        while self._shared:
            _, descriptor = self._shared.popitem()
            os.close(descriptor)
        for extent in self._extents:
            extent.close()

    def _map(self, slot: int) -> None:
        descriptor = self._extents[slot].share()
        try:
            self._range.map(slot * self.extent_bytes, descriptor, self.extent_bytes)
        finally:
            os.close(descriptor)


def granularity_bytes(device: str) -> int:
    """Extents of a pool's memory on `device` ("cpu" or "cuda:N") are multiples of this."""
    if device == "cpu":
        return HostArena.granularity_bytes
    from swiftcache_tier.extents import device_memory

    return device_memory.granularity_bytes(ordinal_of_device(device))
