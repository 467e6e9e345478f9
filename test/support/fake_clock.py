"""Time that passes only when somebody sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable


class FakeClock:
    """Stands in for the module ``time``; starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._to_come: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        """The wall clock, by which files are dated, goes on."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        due = [action for when_s, action in self._to_come if when_s <= self.now_s]
        self._to_come = [event for event in self._to_come if event[0] > self.now_s]
        for action in due:
            action()

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Have ``action`` called by the sleep that reaches ``when_s``."""
        self._to_come.append((when_s, action))
