"""What a process holds, and whether it has let go of it."""

from __future__ import annotations

import time
from typing import NamedTuple

import psutil

LEAKED_BYTES_MAX = 48 << 20
"""Growth that no leak explains: allocators keep some of what was freed."""
LEAKED_FILES_MAX = 4
SETTLE_DEADLINE_S = 60.0


class Holdings(NamedTuple):
    """Resources of one process."""

    rss_bytes: int
    files: int
    threads: int


def holdings(pid: int) -> Holdings:
    """Raises psutil.NoSuchProcess when it has ended."""
    process = psutil.Process(pid)
    with process.oneshot():
        return Holdings(process.memory_info().rss, process.num_fds(), process.num_threads())


def leak(pid: int, before: Holdings) -> str | None:
    """What the process still holds beyond `before` a while after; None if nothing much."""
    end = time.monotonic() + SETTLE_DEADLINE_S
    while True:
        try:
            now = holdings(pid)
        except psutil.NoSuchProcess:
            return "has ended"
        problems = []
        if now.files > before.files + LEAKED_FILES_MAX:
            problems.append(f"{now.files - before.files} descriptors more than before")
        if now.rss_bytes > before.rss_bytes + LEAKED_BYTES_MAX:
            grown_mib = (now.rss_bytes - before.rss_bytes) / (1 << 20)
            problems.append(f"{grown_mib:.1f} MiB more than before")
        if now.threads > before.threads + LEAKED_FILES_MAX:
            problems.append(f"{now.threads - before.threads} threads more than before")
        if not problems or time.monotonic() > end:
            return ", ".join(problems) or None
        time.sleep(0.2)
