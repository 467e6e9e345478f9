"""Blocks that can be copied together: next to each other in donor memory and in the pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# With fewer blocks to a run, one batch of small copies is queued sooner than a copy for each run
# is done: a small copy costs the host some 1.5 us, a strided one the GPU some 13 us to begin.
SCATTERED_BELOW_BLOCKS_PER_RUN = 8


@dataclass(frozen=True, eq=False)
class Runs:
    """A batch on the host, cut where the next block or the next page is not the neighbour.

    addresses: int64 [n], the first byte of each block.
    pages:     int64 [n], the pool page of each block.
    starts:    int64 [runs], where in these two each run begins.
    """

    addresses: NDArray[np.int64]
    pages: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def blocks(self) -> int:
        return len(self.addresses)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [runs], blocks."""
        return np.diff(self.starts, append=self.blocks)


def find_runs(
    addresses: NDArray[np.int64],
    pages: NDArray[np.int64],
    block_bytes: int,
    owners: NDArray[np.int64] | None = None,
) -> Runs:
    """Cut a batch into runs, in the order given: all int64 [n], on the host.

    A run's blocks lie `block_bytes` apart and its pages follow each other. `owners` says whose
    memory each block is, by any numbers: one copy must not cross from one donor's memory to
    another's, though their addresses may touch; None if it is all one's. ValueError if these are
    not int64 [n] of one length.
    """
    if owners is None:
        owners = np.zeros_like(addresses)
    for name, numbers in (("addresses", addresses), ("pages", pages), ("owners", owners)):
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            raise ValueError(f"{name} is {numbers.dtype} {list(numbers.shape)}; expected int64 [n]")
    if not len(addresses) == len(pages) == len(owners):
        raise ValueError(
            f"there are {len(addresses)} addresses, {len(pages)} pages, {len(owners)} owners; "
            f"expected one of each per block"
        )
    continues = (np.diff(addresses) == block_bytes) & (np.diff(pages) == 1) & (np.diff(owners) == 0)
    starts = np.flatnonzero(np.concatenate(([True], ~continues))[: len(addresses)])
    return Runs(addresses, pages, starts)


def is_scattered(blocks: int, runs: int) -> bool:
    """Whether to copy block by block rather than run by run."""
    return blocks < SCATTERED_BELOW_BLOCKS_PER_RUN * runs
