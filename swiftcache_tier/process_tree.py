"""A process that leads a Unix session, and all that it started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import psutil


def members(leader_pid: int) -> list[psutil.Process]:
    """The live processes that descend from the leader, itself among them.

    One whose own parent has died still belongs, by its session; one that left the session belongs
    as long as its parents live. Processes that set out on their own (a donor that its server owns)
    do not belong.
    """
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(leader_pid)
        found = {process.pid: process for process in [leader, *leader.children(recursive=True)]}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader_pid:
                found[pid] = psutil.Process(pid)
    return alive(found.values())


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each that is still there; a process id that was used anew is not touched."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie does not."""
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
