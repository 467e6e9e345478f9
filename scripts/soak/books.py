"""What must hold at any moment, and what the processes take up."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil

from stress.client import Client, Lost

INTERVAL_S = 1.0
GROWN_BYTES_MAX = 48 << 20
"""What an allocator may keep beyond what is used; a leak goes on growing."""
GROWN_FILES_MAX = 8


class Sample(NamedTuple):
    """What one process takes up."""

    rss_bytes: int
    files: int


def wrong_in_server(tier: dict[str, Any]) -> list[str]:
    """What does not add up in the server's own books; a line for each."""
    found = []
    blocks = tier["blocks"]
    if blocks["total"] != blocks["free"] + blocks["used"] + blocks["retiring"]:
        found.append(f"blocks are not free + used + retiring: {blocks}")
    if tier["audits"]["found"]:
        found.append(f"an audit found: {tier['audits']['violated']}")
    for donor in tier["donors"]:
        name, own = donor["name"], donor["blocks"]
        mapped = sum(count for state, count in donor["extents"].items() if state != "free")
        room = mapped * donor["extent_bytes"] // tier["block_bytes"]
        if own["total"] > room:
            found.append(f"donor {name} has {own['total']} blocks in room for {room}")
        if donor["bytes"] > mapped * donor["extent_bytes"]:
            found.append(f"donor {name}: more bytes are mapped than extents are held: {donor}")
        whole = donor["state"] == "joined" and donor["extents"]["lent"] == mapped
        if whole and donor["bytes"] == room_bytes(donor) and own["total"] != room:
            found.append(f"donor {name} has {own['total']} blocks, and {room} when all is mapped")
    if sum(donor["blocks"]["total"] for donor in tier["donors"]) != blocks["total"]:
        found.append("the blocks of all donors are not the blocks of the tier")
    return found


def room_bytes(donor: dict[str, Any]) -> int:
    """Memory of all extents of a donor, whatever their state."""
    return int(sum(donor["extents"].values()) * donor["extent_bytes"])


def wrong_in_donor(extents: Mapping[str, int], expected: int) -> list[str]:
    """Whether a donor's extents add up over its lease states."""
    if sum(extents.values()) == expected:
        return []
    return [f"extents are not the sum of their states, {expected}: {dict(extents)}"]


class Books:
    """Checks every second while it is entered. ``problems`` holds a line for each kind found."""

    def __init__(
        self,
        client: Client,
        donors: Callable[[], list[tuple[str, Mapping[str, int]]]],
        extents: int,
        processes: Callable[[], dict[str, int]],
    ) -> None:
        """``donors`` reads extents by state from donors that answer, of ``extents`` each.
        ``processes`` are the ids of those that must not grow, by name."""
        self.problems: list[str] = []
        self.checks = 0
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self._client = client
        self._donors = donors
        self._extents = extents
        self._processes = processes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="books")

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

    def grown(self) -> list[str]:
        """Processes that take up more in the last quarter of the time than in the second.

        In the first, caches fill up and libraries are loaded.
        """
        found = []
        for name, samples in self.samples.items():
            quarter = len(samples) // 4
            if quarter == 0:
                continue
            early, late = samples[quarter : 2 * quarter], samples[-quarter:]
            grown_bytes = median(s.rss_bytes for s in late) - median(s.rss_bytes for s in early)
            grown_files = median(s.files for s in late) - median(s.files for s in early)
            if grown_bytes > GROWN_BYTES_MAX:
                found.append(f"{name} has grown by {grown_bytes / (1 << 20):.1f} MiB")
            if grown_files > GROWN_FILES_MAX:
                found.append(f"{name} has {grown_files:.0f} descriptors more")
        return found

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            try:
                found = wrong_in_server(self._client.tier())
            except Lost as error:
                found = [f"the server does not say how it stands: {error}"]
            for name, extents in self._donors():
                found += [
                    f"donor {name}: {line}" for line in wrong_in_donor(extents, self._extents)
                ]
            self.problems += [line for line in found if line not in self.problems]
            self.checks += 1
            for name, pid in self._processes().items():
                process = psutil.Process(pid)
                self.samples[name].append(Sample(process.memory_info().rss, process.num_fds()))


class Clock:
    """What an amount of work cost a process, while it is entered."""

    def __init__(self, pid: int) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._process = psutil.Process(pid)

    def __enter__(self) -> Self:
        self._began = (time.monotonic(), self._cpu_s())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        began_wall_s, began_cpu_s = self._began
        self.wall_s = time.monotonic() - began_wall_s
        self.cpu_s = self._cpu_s() - began_cpu_s

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
