"""A copy engine in plain Python, which holds callers to what the real one asks of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from swiftcache_kernel.copy_engine import Rows


class HostCopyEngine:
    """Copies at once, in the calling thread; counts its calls."""

    def __init__(self) -> None:
        self.strided_copies = 0
        self.batches = 0

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        for copy in copies:
            assert copy.width > 0
            assert copy.rows > 0
            assert copy.width <= min(copy.target_pitch, copy.source_pitch)
            for row in range(copy.rows):
                target = copy.target + row * copy.target_pitch
                ctypes.memmove(target, copy.source + row * copy.source_pitch, copy.width)
            self.strided_copies += 1

    def copy_all(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        # In no particular order, as in a real batch.
        for target, source, size in reversed(list(zip(targets, sources, sizes, strict=True))):
            assert {type(target), type(source), type(size)} == {int}
            ctypes.memmove(target, source, size)
        self.batches += 1
