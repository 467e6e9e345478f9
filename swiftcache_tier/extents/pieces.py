"""Which parts of an address range are mapped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class Pieces:
    """The mapped pieces of a range: offsets and sizes in bytes, none overlapping."""

    def __init__(self, size_bytes: int, granularity_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._granularity_bytes = granularity_bytes
        self._size_at: dict[int, int] = {}
        self._offsets: list[int] = []  # keys of _size_at in order

    def require_free(self, offset: int, size_bytes: int) -> None:
        """Raise ValueError unless a piece may be put there."""
        if offset % self._granularity_bytes or size_bytes % self._granularity_bytes:
            raise ValueError(
                f"offset {offset}, {size_bytes} bytes: must be multiples of "
                f"{self._granularity_bytes}"
            )
        if offset < 0 or size_bytes <= 0 or offset + size_bytes > self._size_bytes:
            raise ValueError(
                f"offset {offset}, {size_bytes} bytes: outside a range of {self._size_bytes} bytes"
            )
        index = bisect_left(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] < offset + size_bytes:
            raise ValueError(f"offset {self._offsets[index]} of the range is already mapped")
        if index > 0:
            before = self._offsets[index - 1]
            if before + self._size_at[before] > offset:
                raise ValueError(f"offset {offset} of the range is already mapped")

    def require_mapped(self, offset: int, size_bytes: int) -> list[int]:
        """The offsets of the pieces that fill these bytes; ValueError unless they do, exactly."""
        found, end = [], offset
        while end < offset + size_bytes and end in self._size_at:
            found.append(end)
            end += self._size_at[end]
        if not found or end != offset + size_bytes:
            raise ValueError(f"no extent of {size_bytes} bytes is mapped at offset {offset}")
        return found

    def add(self, offset: int, size_bytes: int) -> None:
        """Enter a piece that `require_free` has passed."""
        self._size_at[offset] = size_bytes
        self._offsets.insert(bisect_left(self._offsets, offset), offset)

    def remove(self, offsets: Sequence[int]) -> None:
        """Take out neighbours that `require_mapped` has found."""
        for offset in offsets:
            del self._size_at[offset]
        first = bisect_left(self._offsets, offsets[0])
        del self._offsets[first : first + len(offsets)]

    def clear(self) -> None:
        """Take out all pieces."""
        self._size_at.clear()
        self._offsets.clear()

    @property
    def mapped_bytes(self) -> int:
        return sum(self._size_at.values())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(offset, size) of each piece, as of now."""
        return iter(list(self._size_at.items()))
