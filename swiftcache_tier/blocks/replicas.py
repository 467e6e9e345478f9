"""Which blocks are copies of which, so that memory that is really gone costs no recompute."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

NONE = -1
"""In arrays of block ids: there is no such block."""


class BlockStore(Protocol):
    """Where copies are placed: a tier, or a block pool."""

    def alloc_apart(self, placed: np.ndarray) -> np.ndarray: ...

    def free(self, ids: np.ndarray) -> None: ...


class Refill(NamedTuple):
    """Blocks that were short of a copy, and where it is to be written; int64 (n,) both."""

    sources: np.ndarray
    targets: np.ndarray


class Replicas:
    """The books of copies: a block, which is what users know, and up to `wanted - 1` copies of it.

    No two of them lie on one donor. A block whose copies found no room has fewer, and is `short`
    until `refill`. Moves no bytes. Used by the scheduler thread. Ids are int64 arrays of shape
    (n,).
    """

    def __init__(self, store: BlockStore, wanted: int) -> None:
        """`wanted` is how often each block is to exist, itself included; at least 2."""
        self._store = store
        self._extra = wanted - 1
        self._copies: dict[int, list[int]] = {}
        self._block_of: dict[int, int] = {}
        self._short: dict[int, None] = {}  # in order of entry

    @property
    def copies(self) -> int:
        """Blocks that are copies of others."""
        return len(self._block_of)

    @property
    def short(self) -> int:
        """Blocks that have fewer copies than wanted."""
        return len(self._short)

    def copy_ids(self) -> np.ndarray:
        """All blocks that are copies of others."""
        return np.array(list(self._block_of), dtype=np.int64)

    def place(self, blocks: np.ndarray) -> None:
        """Take room for the copies of blocks that have just been handed out, as far as it goes."""
        for block in blocks.tolist():
            self._copies[block] = []
        for _ in range(self._extra):
            self._add_copies(blocks)
        self._note_short(blocks)

    def of(self, blocks: np.ndarray) -> np.ndarray:
        """The copies of each block, shape (n, wanted - 1), NONE where there are fewer."""
        table = np.full((len(blocks), self._extra), NONE, dtype=np.int64)
        for row, block in enumerate(blocks.tolist()):
            copies = self._copies[block]
            table[row, : len(copies)] = copies
        return table

    def forget(self, blocks: np.ndarray) -> None:
        """The blocks are being freed: their copies are freed here."""
        gone = []
        for block in blocks.tolist():
            copies = self._copies.pop(block)
            gone += copies
            self._short.pop(block, None)
        self._free(gone)

    def clear(self) -> None:
        """All blocks were freed, copies included."""
        self._copies.clear()
        self._block_of.clear()
        self._short.clear()

    def rename(self, blocks: np.ndarray, targets: np.ndarray) -> None:
        """The content of `blocks` goes on in `targets`, which are no copies of anything."""
        for block, target in zip(blocks.tolist(), targets.tolist(), strict=True):
            self._rename(block, target)

    def promote(self, blocks: np.ndarray, copies: np.ndarray) -> None:
        """Each copy takes its block's place; the blocks themselves are the caller's to free."""
        for block, copy in zip(blocks.tolist(), copies.tolist(), strict=True):
            self._copies[block].remove(copy)
            del self._block_of[copy]
            self._rename(block, copy)
        self._note_short(copies)

    def drop(self, ids: np.ndarray, keep: Container[int]) -> int:
        """Free those of `ids` that are copies, but for copies of blocks in `keep`. Returns how
        many."""
        gone = {
            copy: block
            for copy in ids.tolist()
            if (block := self._block_of.get(copy)) is not None and block not in keep
        }
        for copy, block in gone.items():
            self._copies[block].remove(copy)
        self._free(list(gone))
        self._note_short(np.array(list(gone.values()), dtype=np.int64))
        return len(gone)

    def refill(self, blocks_max: int, keep_out: Container[int]) -> Refill:
        """Enter a new copy of blocks that are short, as far as there is room; the caller writes it.

        Looks at the `blocks_max` that have been short for the longest, and leaves out `keep_out`.
        """
        looked_at = list(islice(self._short, blocks_max))
        blocks = np.array([b for b in looked_at if b not in keep_out], dtype=np.int64)
        placed = self._add_copies(blocks)
        for block in looked_at:
            # At the end of the queue, so that those without room do not stand in others' way.
            self._short.pop(block)
            self._short[block] = None
        self._note_short(blocks)
        return Refill(blocks[placed != NONE], placed[placed != NONE])

    def _add_copies(self, blocks: np.ndarray) -> np.ndarray:
        """One more copy for each block; returns where, NONE where there is no room."""
        if blocks.size == 0:
            return blocks
        added = self._store.alloc_apart(np.column_stack([blocks, self.of(blocks)]))
        for block, copy in zip(blocks.tolist(), added.tolist(), strict=True):
            if copy != NONE:
                self._copies[block].append(copy)
                self._block_of[copy] = block
        return added

    def _rename(self, block: int, target: int) -> None:
        copies = self._copies.pop(block)
        self._copies[target] = copies
        for copy in copies:
            self._block_of[copy] = target
        if block in self._short:
            del self._short[block]
            self._short[target] = None

    def _note_short(self, blocks: np.ndarray) -> None:
        for block in blocks.tolist():
            if len(self._copies[block]) < self._extra:
                self._short.setdefault(block)
            else:
                self._short.pop(block, None)

    def _free(self, copies: list[int]) -> None:
        for copy in copies:
            del self._block_of[copy]
        if copies:
            self._store.free(np.array(copies, dtype=np.int64))
