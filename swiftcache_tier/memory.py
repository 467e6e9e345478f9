"""How much host memory a donor may promise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil


def available_host_bytes() -> int:
    """RAM that could be used now without swapping, within the limits of this control group.

    The size of /dev/shm has no say in it: extents are memfds, which live on a mount of the
    kernel's own that has no limit. They count as RAM, and against the control group, like any.
    """
    available: int = psutil.virtual_memory().available
    headroom = cgroup_headroom_bytes(Path("/proc/self"))
    return available if headroom is None else min(available, headroom)


def cgroup_headroom_bytes(proc_self: Path) -> int | None:
    """What the memory limits of a process's control groups leave to it; None if there are none.

    `proc_self` is the folder of the process in /proc. Reads versions 1 and 2. A limit binds all
    groups below its own, so the tightest from the process's group up to the root of the mount
    counts. Page cache that the kernel would drop first is not counted as used.
    """
    rooms = [_room_bytes(folder, version) for folder, version in _memory_groups(proc_self)]
    return min((room for room in rooms if room is not None), default=None)


class _Version(NamedTuple):
    """The files of a control group that tell of memory."""

    limits: tuple[str, ...]
    usage: str
    droppable: str
    """The line of memory.stat that counts droppable page cache of the group and those below."""


_V1 = _Version(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "total_inactive_file",
)
# Above memory.high the kernel slows a process down to a crawl, so that is a limit too.
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "inactive_file")

# Version 1 writes "no limit" as the largest multiple of the page size.
_NO_LIMIT_BYTES = 2**62


def _memory_groups(proc_self: Path) -> Iterator[tuple[Path, _Version]]:
    """Folders of the process's memory control groups, each with those above it."""
    group_of: dict[_Version, PurePosixPath] = {}
    for line in _lines(proc_self / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            group_of[_V2] = PurePosixPath(group)
        elif "memory" in controllers.split(","):
            group_of[_V1] = PurePosixPath(group)
    for line in _lines(proc_self / "mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        root, mount_point = mount.split()[3:5]
        # The other controllers of version 1 are mounts too, in which no file of ours is found.
        version = {"cgroup2": _V2, "cgroup": _V1}.get(filesystem.split()[0])
        if version is None or version not in group_of:
            continue
        path = group_of[version]
        # Inside a container the mount may start at the container's own group.
        inside = path.relative_to(root) if path.is_relative_to(root) else PurePosixPath()
        for folder in (inside, *inside.parents):
            yield Path(mount_point) / folder, version


def _room_bytes(folder: Path, version: _Version) -> int | None:
    limits = [
        limit
        for name in version.limits
        for line in _lines(folder / name)
        if line.isdigit() and (limit := int(line)) < _NO_LIMIT_BYTES
    ]
    usage = next(iter(_lines(folder / version.usage)), None)
    if not limits or usage is None:
        return None
    droppable = 0
    for line in _lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == version.droppable:
            droppable = int(value)
    return max(0, min(limits) - max(0, int(usage) - droppable))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there in this version, or at the root of the hierarchy
        return []
