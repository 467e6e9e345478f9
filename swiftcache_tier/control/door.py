"""The Unix socket at which a donor is found: taken, found stale, connected to."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from swiftcache_tier.control.runtime_dir import NAME_ANOTHER, DonorPaths
from swiftcache_tier.errors import SwiftCacheError


class NoDonor(SwiftCacheError):
    """Nobody answers at a donor's address."""

    def __init__(self, message: str, *, is_vacant: bool) -> None:
        """`is_vacant`: no program listens there, so that a donor may take the place."""
        super().__init__(message)
        self.is_vacant = is_vacant


def take_door(
    paths: DonorPaths, *, backlog: int, mode: int, lock_timeout_s: float, name_flag: str = "--name"
) -> socket.socket:
    """A listening, non-blocking socket at `paths.door`; sockets of an ended donor are replaced.

    `name_flag`: by which whoever starts the donor chooses its name.
    Raises SwiftCacheError when a live donor has the name, or the folder cannot be written. Blocks
    while another donor starts in the same folder, for `lock_timeout_s` at most.
    """
    try:
        with _locked(paths.door.parent, lock_timeout_s):
            return _listen(paths, backlog, mode, name_flag)
    except OSError as error:
        raise SwiftCacheError(
            f"no socket can be made at {paths.door}: {error.strerror}; {NAME_ANOTHER}"
        ) from error


def leave_door(paths: DonorPaths) -> None:
    """Remove the sockets of a donor that ends."""
    for path in paths:
        path.unlink(missing_ok=True)


def was_left(paths: DonorPaths) -> bool:
    """Whether a donor has ended without taking its sockets along."""
    return paths.door.exists() and _is_vacant(paths)


def clear_door(paths: DonorPaths, *, lock_timeout_s: float) -> bool:
    """Remove what a donor that was killed left there. Returns whether the place is free now.

    It is not while a program listens, or where something else than a socket lies: both are left
    alone. Raises OSError where there is no such folder or it cannot be written, and SwiftCacheError
    when other donors have been starting in it for `lock_timeout_s`.
    """
    with _locked(paths.door.parent, lock_timeout_s):
        is_vacant = _is_vacant(paths)
        if is_vacant:
            leave_door(paths)
    return is_vacant


def check_vacant(paths: DonorPaths, name_flag: str = "--name") -> None:
    """Raises SwiftCacheError when a live donor has the name, chosen with `name_flag`."""
    try:
        connect_door(paths).close()
    except NoDonor as error:
        if not error.is_vacant:
            raise SwiftCacheError(
                f"donor name {paths.name!r} is taken: {error}; choose another with {name_flag}"
            ) from error
    else:
        raise SwiftCacheError(
            f"donor name {paths.name!r} is taken by a donor that runs at {paths.door}: choose "
            f"another with {name_flag}, or end that donor"
        )


def connect_door(paths: DonorPaths) -> socket.socket:
    """A non-blocking connection to the donor's door. Raises NoDonor when nobody listens."""
    with ExitStack() as on_failure:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_failure.callback(connection.close)
            connection.setblocking(False)
            connection.connect(str(paths.door))
        except OSError as error:
            raise _no_donor(paths, error) from error
        on_failure.pop_all()
    return connection


def _is_vacant(paths: DonorPaths) -> bool:
    try:
        connect_door(paths).close()
    except NoDonor as error:
        return error.is_vacant
    return False


def _listen(paths: DonorPaths, backlog: int, mode: int, name_flag: str) -> socket.socket:
    check_vacant(paths, name_flag)
    leave_door(paths)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        door.setblocking(False)
        door.bind(str(paths.door))
        paths.door.chmod(mode)
        door.listen(backlog)
    except OSError:
        door.close()
        raise
    return door


def _no_donor(paths: DonorPaths, error: OSError) -> NoDonor:
    number = error.errno
    if number == errno.ECONNREFUSED and not paths.door.is_socket():
        number = errno.ENOTSOCK  # Linux makes no difference, but that is no place to take
    is_vacant = number in (errno.ENOENT, errno.ECONNREFUSED)
    return NoDonor(_why_not(paths, number, str(error.strerror)), is_vacant=is_vacant)


def _why_not(paths: DonorPaths, number: int | None, problem: str) -> str:
    match number:
        case errno.ENOENT | errno.ENOTDIR:
            return (
                f"there is no donor at {paths.spec}: {paths.door} does not exist; start one "
                f"(swiftcache donor --name {paths.name}) or name one that `swiftcache status` lists"
            )
        case errno.ECONNREFUSED:
            return (
                f"the donor at {paths.spec} has ended and left its sockets behind: start it again "
                f"(a server that lends: on its port), or delete {paths.door} and {paths.control}"
            )
        case errno.EPROTOTYPE | errno.ENOTSOCK:
            return f"{paths.door} is no donor's socket: name one that `swiftcache status` lists"
        case errno.EAGAIN:
            return (
                f"the donor at {paths.spec} does not take connections: it is stopped or stuck; let "
                f"it go on (SIGCONT) or end it"
            )
        case _:
            return f"the donor at {paths.spec} cannot be reached: {problem}"


@contextmanager
def _locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """Keep other donors that start in `folder` out: two could find the same socket stale, and the
    second would remove the socket that the first has just made."""
    deadline_s = time.monotonic() + timeout_s
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise SwiftCacheError(
                        f"another donor has been starting in {folder} for {timeout_s:g} s: end it "
                        f"if it is stuck, then try again"
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
