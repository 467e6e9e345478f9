"""Change single bits of donors' memory behind everybody's back."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self


def extents_of(donors: Iterable[dict[str, Any]]) -> list[Path]:
    """Files of the extents of those donors, as a server lists them, that lend host memory.

    Memory of GPUs cannot be reached from outside. Donors of another user are left out.
    """
    found = []
    for donor in donors:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{donor['pid']}/fd").iterdir():
                if os.readlink(link).startswith("/memfd:"):
                    found.append(link)
    return found


class Flipper:
    """Flips ``per_s`` bits a second while it is entered; ``flips`` counts them.

    Where a flip lands is random, so many land in blocks that are free or are never asked for.
    """

    def __init__(self, extents: list[Path], per_s: float, seed: int) -> None:
        self.flips = 0
        self._extents = extents
        self._interval_s = 1 / per_s
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flipper")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            with contextlib.suppress(FileNotFoundError):  # a donor that has left
                self._flip(self._rng.choice(self._extents))

    def _flip(self, extent: Path) -> None:
        descriptor = os.open(extent, os.O_RDWR)
        try:
            at = self._rng.randrange(os.fstat(descriptor).st_size)
            [byte] = os.pread(descriptor, 1, at)
            os.pwrite(descriptor, bytes([byte ^ 1 << self._rng.randrange(8)]), at)
        finally:
            os.close(descriptor)
        self.flips += 1
