"""Buffers of which a part is the same memory in every other one: the layer window.

Each layer has one K and one V buffer. The first part of a buffer is memory of its own. The rest is
one of two sets of memory, by the parity of the layer, that all layers of that parity have mapped
there: what is written there for layer 0 is what layer 2 reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from swiftcache_tier.extents.base import Arena, Extent
from swiftcache_tier.extents.host import HostArena
from swiftcache_tier.extents.own_memory import arena_and_range, ordinal_of_device
from swiftcache_tier.stream.sizing import unit_tokens_of

PARITIES = 2


class BufferSize(NamedTuple):
    """Of one buffer, in bytes: multiples of the arena's granularity."""

    own_bytes: int
    window_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.own_bytes + self.window_bytes


def unit_tokens(device: str, page_tokens: int, row_bytes: tuple[int, int]) -> int:
    """`unit_tokens_of` for the memory of `device`, "cpu" or "cuda:N"."""
    return unit_tokens_of(granularity_bytes(device), page_tokens, row_bytes)


def granularity_bytes(device: str) -> int:
    """What own and window bytes are multiples of: `device` is "cpu" or "cuda:N"."""
    if device == "cpu":
        return HostArena.granularity_bytes
    from swiftcache_tier import cuda_driver
    from swiftcache_tier.extents import device_memory

    ordinal = ordinal_of_device(device)
    cuda_driver.device(ordinal)  # starts the driver, or says why it cannot
    return device_memory.granularity_bytes(ordinal)


class AliasedBuffers:
    """K and V buffers of all layers, on "cpu" (shared host memory) or "cuda:N".

    The memory reads as zeros at first. It is nobody's but this process's: no descriptor leaves it.
    `close` unmaps everything; nothing may read or write the buffers any more then.
    """

    def __init__(self, device: str, layers: int, k: BufferSize, v: BufferSize) -> None:
        """Raises SwiftCacheError when the system or the device has not enough memory."""
        self._sizes = (k, v)
        self._layers = layers
        stride = layers * k.total_bytes, layers * v.total_bytes
        self._starts = (0, stride[0])
        arena, self._range = arena_and_range(device, sum(stride))
        with ExitStack() as undo:
            undo.callback(self._range.close)
            for side, size in enumerate(self._sizes):
                for layer in range(layers):
                    with _lent(arena, size.own_bytes) as descriptor:
                        self._range.map(self._offset(side, layer), descriptor, size.own_bytes)
                for parity in range(min(PARITIES, layers)) if size.window_bytes else ():
                    with _lent(arena, size.window_bytes) as descriptor:
                        for layer in range(parity, layers, PARITIES):
                            at = self._offset(side, layer) + size.own_bytes
                            self._range.map(at, descriptor, size.window_bytes)
            undo.pop_all()

    def address(self, side: int, layer: int) -> int:
        """Where a buffer begins; side 0 is K, 1 is V."""
        return self._range.base + self._offset(side, layer)

    def close(self) -> None:
        """May be repeated."""
        self._range.close()

    def _offset(self, side: int, layer: int) -> int:
        return self._starts[side] + layer * self._sizes[side].total_bytes


@contextmanager
def _lent(arena: Arena, size_bytes: int) -> Iterator[int]:
    """A descriptor of new memory, which lives on in what is mapped of it."""
    extent: Extent = arena.create(size_bytes)
    try:
        descriptor = extent.share()
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        extent.close()
