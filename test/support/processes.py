"""Processes a test starts: how they are waited for and how they end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable

import psutil

KILL_TIMEOUT_S = 10.0


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until(
    condition: Callable[[], object], deadline_s: float, what: str, interval_s: float = 0.1
) -> None:
    """Return once ``condition()`` is true; AssertionError naming ``what`` after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        time.sleep(interval_s)


def started_by(leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The live processes that ``leader`` started, whoever their parent is by now.

    ``leader`` must have been started with ``start_new_session=True``: its descendants share its
    Unix session even after their own parent died. Those that left that session count as long as
    their parents live.
    """
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(leader.pid).children(recursive=True):
            found[child.pid] = child
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader.pid:
                found[pid] = psutil.Process(pid)
    found.pop(leader.pid, None)
    return [process for process in found.values() if _alive(process)]


def end_tree(leader: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """End ``leader`` and everything it started, with SIGKILL.

    With a ``grace_s`` the leader gets SIGTERM first and that long to end by itself.
    """
    tree = started_by(leader)
    if grace_s and leader.poll() is None:
        leader.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(grace_s)
    tree += started_by(leader)
    leader.kill()
    leader.wait(KILL_TIMEOUT_S)
    for process in tree + started_by(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(tree, timeout=KILL_TIMEOUT_S)
    assert not left, f"processes that outlived SIGKILL: {left}"


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
