"""Donors that come, end, are killed, and hang for a while."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from support.donors import Donor

PAUSE_S = (2.0, 10.0)
HANGS_S = (1.0, 8.0)
"""Shorter and longer than a receiver's patience."""


class ComingAndGoing:
    """Does something to one of the donors ``names`` every few seconds while it is entered.

    On leaving, all of them run again. ``events`` counts what was done.
    """

    def __init__(self, runtime_dir: Path, names: list[str], seed: int, **donor: str) -> None:
        """``donor``: what each is started with."""
        self.events: Counter[str] = Counter()
        self.problem: str | None = None
        self._runtime_dir = runtime_dir
        self._donor = donor
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._running: dict[str, Donor | None] = dict.fromkeys(names)
        self._thread = threading.Thread(target=self._run, name="coming and going")

    def start_all(self) -> None:
        for name, donor in self._running.items():
            if donor is None:
                self._running[name] = self._start(name)

    def end_all(self) -> None:
        for donor in self._running.values():
            if donor is not None:
                donor.__exit__(None, None, None)

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
        self.start_all()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._rng.uniform(*PAUSE_S)):
                self._do_something(self._rng.choice(sorted(self._running)))
        except Exception as error:
            self.problem = f"donors do not come and go any more: {error}"

    def _do_something(self, name: str) -> None:
        donor = self._running[name]
        if donor is None:
            self._running[name] = self._start(name)
            self.events["came"] += 1
            return
        what = self._rng.choice(("killed", "ended", "hung", "restarted"))
        self.events[what] += 1
        match what:
            case "killed":
                donor.kill()
                self._running[name] = None
            case "restarted":
                donor.kill()
                self._running[name] = self._start(name)
            case "ended":
                code = donor.leave()
                self._running[name] = None
                if code != 0:
                    self.problem = f"donor {name} ended with exit code {code}"
            case "hung":
                donor.process.send_signal(signal.SIGSTOP)
                try:
                    self._over.wait(self._rng.uniform(*HANGS_S))
                finally:
                    donor.process.send_signal(signal.SIGCONT)

    def _start(self, name: str) -> Donor:
        return Donor(self._runtime_dir, name, **self._donor).__enter__()
