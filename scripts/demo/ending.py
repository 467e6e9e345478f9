"""Leave no process behind, however the demo ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def clean_ending() -> Iterator[None]:
    """Turn a signal into SystemExit, once, so that every ``with`` block ends what it started.

    Whatever a signal kept from being noted by its starter, in the moment it was started, is still
    a child of this process, and is killed last.
    """
    for signum in SIGNALS:
        signal.signal(signum, _leave)
    try:
        yield
    finally:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _leave(signum: int, _frame: FrameType | None) -> None:
    for each in SIGNALS:  # an impatient second Ctrl-C must not interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + signum)
