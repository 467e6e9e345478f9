"""How much of a measured time goes into one function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Calls a function, and adds up how long it takes until `read`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        began_s = time.monotonic()
        try:
            return self._function(*arguments)
        finally:
            self._seconds += time.monotonic() - began_s

    def read(self) -> float:
        """Seconds since the last call of this."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
