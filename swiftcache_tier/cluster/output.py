"""Lines of several processes on one terminal, each behind the name of who wrote it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from rich.console import Console
from rich.text import Text

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Output:
    """Forwards `name | line` to standard output, names in colours on a terminal.

    What `swiftcache up` itself has to say goes to standard error. `lost` is called when nobody
    reads any more (a pipe that was closed); lines are dropped then.
    """

    def __init__(self, names: Iterable[str], lost: Callable[[], None]) -> None:
        ordered = list(names)
        self._width = max(map(len, ordered), default=0)
        self._styles = {name: _STYLES[i % len(_STYLES)] for i, name in enumerate(ordered)}
        self._console = _Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._lost = lost
        self._is_lost = False

    def forward(self, name: str, line: str) -> None:
        prefix = Text(f"{name:{self._width}} | ", style=self._styles.get(name, ""))
        self._write(lambda: self._console.print(prefix + Text(line)))

    def say(self, line: str) -> None:
        self._write(lambda: print(f"swiftcache up: {line}", file=sys.stderr, flush=True))

    def _write(self, write: Callable[[], None]) -> None:
        if self._is_lost:
            return
        try:
            write()
            sys.stdout.flush()
        except OSError:
            self._is_lost = True
            # What is still buffered would fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self._lost()


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit here, with servers left behind."""
        raise BrokenPipeError
