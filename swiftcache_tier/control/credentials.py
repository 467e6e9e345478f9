"""Who is at the other end of a Unix socket, and until when."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError

_UCRED = struct.Struct("3i")
_SO_PEERPIDFD = 77  # Linux 6.5; not named by Python 3.11


class Peer(NamedTuple):
    """The process that opened the other end of a connection."""

    pid: int
    uid: int
    pidfd: int
    """Becomes readable when the process ends; the caller closes it."""


class Credentials(NamedTuple):
    """What the kernel noted of the process that opened the other end of a connection."""

    pid: int
    """0 for a process of a namespace that this one does not see."""
    uid: int


def credentials_of(connection: socket.socket) -> Credentials:
    """Ask the kernel who is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(credentials)
    return Credentials(pid, uid)


def peer_of(connection: socket.socket) -> Peer:
    """Who is at the other end, to be watched. Raises SwiftCacheError if that process cannot be:
    it has ended, or lives in a process namespace that this one does not see."""
    pid, uid = credentials_of(connection)
    if pid <= 0:
        raise SwiftCacheError(
            "the peer's process is not visible from here: run donor and receiver in one process "
            "(PID) namespace, for containers with --pid=host"
        )
    try:
        return Peer(pid, uid, _pidfd_of(connection, pid))
    except OSError as error:
        raise SwiftCacheError(f"the peer, process {pid}, cannot be watched: {error}") from error


def uids_of(users: Iterable[str]) -> frozenset[int]:
    """Uids of user names. Raises SwiftCacheError for a name that is not known."""
    uids = set()
    for user in users:
        try:
            uids.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise SwiftCacheError(
                f"user {user!r} is not known on this machine: give a login name, as in "
                f"--allow-user {user_name(os.geteuid())}"
            ) from None
    return frozenset(uids)


def user_name(uid: int) -> str:
    """Login name of `uid`, or the number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _pidfd_of(connection: socket.socket, pid: int) -> int:
    try:
        # Opened by the kernel for the very process that connected. By number, another process
        # could have taken the pid meanwhile.
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return os.pidfd_open(pid)
