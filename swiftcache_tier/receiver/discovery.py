"""Where donors may appear that a receiver should join."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import TypeAlias

from swiftcache_tier.control.runtime_dir import DonorPaths, list_donors

Identity: TypeAlias = tuple[int, int]
"""What tells a socket from a later one at the same place."""


class Discovery:
    """Looks for donors that are there and not joined. Used by one thread."""

    def __init__(self, own_donor: DonorPaths | None = None) -> None:
        """`own_donor`: that of a server which lends too, and would find itself."""
        self._own_donor = own_donor
        self._named: list[DonorPaths] = []
        self._expected: list[DonorPaths] = []
        self._folder: Path | None = None
        self._refused: dict[Path, Identity] = {}

    def watch(self, paths: DonorPaths) -> None:
        """Look for the donor at `paths`, which the user named."""
        self._named.append(paths)

    def expect(self, paths: DonorPaths) -> None:
        """Look for the donor at `paths`, which this process starts."""
        self._expected.append(paths)

    def watch_folder(self, runtime_dir: Path) -> None:
        """Look for all donors in `runtime_dir`."""
        self._folder = runtime_dir

    def is_named(self, paths: DonorPaths) -> bool:
        """Whether the user named this very donor."""
        return paths in self._named

    def refuse(self, paths: DonorPaths, identity: Identity | None) -> None:
        """Do not report this donor again, as long as its socket is the one of `identity`."""
        if identity is not None:
            self._refused[paths.door] = identity

    def find(self, taken: Container[Path]) -> Sequence[DonorPaths]:
        """Donors whose doors exist, are not in `taken` and were not refused."""
        candidates = self._named + self._expected
        if self._folder is not None:
            candidates += list_donors(self._folder)
        return [
            paths
            for paths in dict.fromkeys(candidates)
            if paths != self._own_donor
            and paths.door not in taken
            and (identity := identity_of(paths.door)) is not None
            and self._refused.get(paths.door) != identity
        ]


def identity_of(door: Path) -> Identity | None:
    """What tells a socket from a later one at the same place; None if there is none."""
    try:
        status = door.stat()
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
