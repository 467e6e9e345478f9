"""The folder where donors put their sockets and receivers find them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from swiftcache_tier.control.credentials import user_name
from swiftcache_tier.control.messages import NAME_FORM, NAME_PATTERN
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.spec import CONTROL_SUFFIX, DOOR_SUFFIX

NAME_ANOTHER = "name another runtime directory (SWIFTCACHE_RUNTIME_DIR)"
"""What to do about one that cannot be used. The flags of servers and of this package differ."""

# sun_path of sockaddr_un, less the zero at its end.
_SOCKET_PATH_BYTES_MAX = 107


class DonorPaths(NamedTuple):
    """The two sockets of one donor."""

    door: Path
    """Where peers present themselves and descriptors are handed over."""
    control: Path

    @property
    def spec(self) -> str:
        """How a user names this donor to a receiver."""
        return f"ipc://{self.door.with_suffix('')}"

    @property
    def name(self) -> str:
        return self.door.name.removesuffix(DOOR_SUFFIX)


def default_runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`SWIFTCACHE_RUNTIME_DIR`, else a folder of this user's own. Nothing is created."""
    if chosen := environ.get("SWIFTCACHE_RUNTIME_DIR"):
        return Path(chosen).absolute()
    session_dir = environ.get("XDG_RUNTIME_DIR")
    if session_dir and Path(session_dir).is_dir():
        return Path(session_dir) / "swiftcache"
    return Path(f"/tmp/swiftcache-{os.geteuid()}")


def ensure_runtime_dir(path: Path) -> None:
    """Create the folder (0700) unless it is there, and check it as `check_runtime_dir` does."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SwiftCacheError(
            f"runtime directory {path} cannot be created: {error.strerror}; {NAME_ANOTHER}"
        ) from error
    check_runtime_dir(path)


def check_runtime_dir(path: Path) -> None:
    """Raise SwiftCacheError if others could plant sockets in the folder. An absent one is fine."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise SwiftCacheError(
            f"runtime directory {path} cannot be read: {error.strerror}; {NAME_ANOTHER}"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise SwiftCacheError(
            f"runtime directory {path} is a file: expected a folder; {NAME_ANOTHER}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise SwiftCacheError(
            f"runtime directory {path} is owned by user {user_name(status.st_uid)}: expected one "
            f"of user {user_name(os.geteuid())}'s own; {NAME_ANOTHER}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        remedy = f"run chmod 700 {path}, or {NAME_ANOTHER}" if _may_close(path) else NAME_ANOTHER
        raise SwiftCacheError(
            f"runtime directory {path} may be written by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): {remedy}"
        )


def donor_paths(runtime_dir: Path, name: str) -> DonorPaths:
    """Sockets of the donor `name`. Raises SwiftCacheError for a name or path that cannot be."""
    if not re.search(NAME_PATTERN, name):
        raise SwiftCacheError(f"donor name {name!r} cannot be used: expected {NAME_FORM}")
    return donor_paths_at(runtime_dir / name)


def engine_donor_name(port: int) -> str:
    """Of the donor in a server on `port` that lends its own memory."""
    return f"engine-{port}"


def donor_paths_at(path: Path) -> DonorPaths:
    """Sockets of the donor at `path`, as in an `ipc://` SPEC. Raises SwiftCacheError."""
    paths = _paths(path)
    length = len(os.fsencode(paths.door))
    if length > _SOCKET_PATH_BYTES_MAX:
        raise SwiftCacheError(
            f"socket path {paths.door} is {length} bytes long: Linux allows "
            f"{_SOCKET_PATH_BYTES_MAX}; choose a shorter donor name, or {NAME_ANOTHER}"
        )
    return paths


def list_donors(runtime_dir: Path) -> list[DonorPaths]:
    """Sockets of all donors that run in the folder, or did and left them, by name."""
    try:
        entries = [entry.name for entry in os.scandir(runtime_dir)]
    except OSError:  # not there yet, or not any more
        return []
    names = sorted(n.removesuffix(DOOR_SUFFIX) for n in entries if n.endswith(DOOR_SUFFIX))
    return [_paths(runtime_dir / name) for name in names if re.search(NAME_PATTERN, name)]


def _may_close(path: Path) -> bool:
    """Whether a folder can be closed to others without harm: it is this user's own, not shared by
    design as /tmp is, and holds nothing but this user's donors."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_ISVTX | stat.S_IWOTH):
        return False
    try:
        with os.scandir(path) as entries:
            return all(
                entry.name.endswith((DOOR_SUFFIX, CONTROL_SUFFIX))
                and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                for entry in entries
            )
    except OSError:  # it may not be read, or something in it has just gone
        return False


def _paths(path: Path) -> DonorPaths:
    return DonorPaths(Path(f"{path}{DOOR_SUFFIX}"), Path(f"{path}{CONTROL_SUFFIX}"))
