"""The memory of a donor: its extents, and the thread that scrubs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from swiftcache_tier.extents import Arena


class Shared(Protocol):
    """Memory of which descriptors can be handed out, extent by extent."""

    def share(self, slot: int) -> int:
        """A descriptor of the extent for its next holder; the caller closes it. Raises OSError."""


class ExtentStore:
    """All extents of a donor, made at once.

    Memory of a GPU is taken and zeroed then; host memory costs RAM only where it was written.
    """

    def __init__(self, arena: Arena, extent_bytes: int, extents: int) -> None:
        """Raises SwiftCacheError when the system refuses; nothing is kept then."""
        self._extents = []
        try:
            for _ in range(extents):
                self._extents.append(arena.create(extent_bytes))
        except BaseException:
            self._close_extents()
            raise
        # Scrubbing frees or zeroes gigabytes; heartbeats must go on meanwhile. One thread, so an
        # extent is never used by two at once: an extent that is being scrubbed is not offered.
        self._scrubber = ThreadPoolExecutor(1, thread_name_prefix="scrub")

    def share(self, slot: int) -> int:
        """A descriptor of the extent for its next holder; the caller closes it. Raises OSError."""
        return self._extents[slot].share()

    def taken_bytes(self, slots: Iterable[int]) -> int:
        """Memory of the device that these extents, none of which is being scrubbed, take up now."""
        return sum(self._extents[slot].taken_bytes() for slot in slots)

    async def scrub(self, slots: Sequence[int]) -> tuple[list[int], OSError | None]:
        """Make extents read as zeros, out of their last holders' reach.

        Returns those that do, and why one does not, if one does not: it may be tried again.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._scrubber, self._scrub, slots)

    def close(self) -> None:
        """Give all memory up that no receiver has mapped."""
        self._scrubber.shutdown(wait=True, cancel_futures=True)
        self._close_extents()

    def _close_extents(self) -> None:
        for extent in self._extents:
            extent.close()

    def _scrub(self, slots: Sequence[int]) -> tuple[list[int], OSError | None]:
        clean: list[int] = []
        problem = None
        for slot in slots:
            try:
                self._extents[slot].scrub()
                clean.append(slot)
            except OSError as error:
                problem = error
        return clean, problem
