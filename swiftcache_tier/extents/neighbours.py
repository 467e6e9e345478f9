"""Extents side by side, which one call serves together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


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
