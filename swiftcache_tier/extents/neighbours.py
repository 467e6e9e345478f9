"""Extents side by side: one call serves them together, and blocks lie across their edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


def runs_of(slots: Iterable[int], most: int | None = None) -> Iterator[range]:
    """Cut distinct `slots` into runs of neighbours, ascending, of `most` at most."""
    run = range(0)
    for slot in sorted(slots):
        if run and (slot != run.stop or len(run) == most):
            yield run
            run = range(0)
        run = range(run.start if run else slot, slot + 1)
    if run:
        yield run


def side_by_side(costs: np.ndarray, taken: Iterable[int], most: int, worth: float) -> list[int]:
    """Up to `most` extents that cost little, and are few runs together with those `taken` already.

    costs: float64 [extents], inf for those that cannot be had. Each neighbour that an extent has
    among the taken, or the chosen before it, is `worth` so much. Of equals that with most room
    around it is chosen, then the highest.
    """
    beside = np.zeros(len(costs) + 2, dtype=bool)  # with one more at either end
    beside[1 + np.fromiter(taken, dtype=np.int64)] = True
    left = costs.astype(np.float64)
    room = _room(np.isfinite(left))
    chosen: list[int] = []
    while len(chosen) < most:
        scores = left - worth * (beside[:-2].astype(int) + beside[2:])
        least = scores.min()
        if not np.isfinite(least):
            break
        equals = np.flatnonzero(scores == least)[::-1]
        slot = int(equals[np.argmax(room[equals])])
        left[slot] = np.inf
        beside[1 + slot] = True
        chosen.append(slot)
    return chosen


def _room(some: np.ndarray) -> np.ndarray:
    """How long the run is that each of some, bool [n], lies in: int64 [n], 0 for the others."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], some.astype(np.int8), [0]))))
    room = np.zeros(len(some), dtype=np.int64)
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        room[start:end] = end - start
    return room
