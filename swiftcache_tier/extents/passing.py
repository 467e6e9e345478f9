"""Descriptors between processes, over a Unix socket.

A record is a few payload bytes and the descriptors that belong to them. Sockets are SOCK_SEQPACKET:
the kernel keeps the borders of records, so a record is sent and received whole or not at all.
"""

from __future__ import annotations

import array
import os
import resource
import socket
from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError

FDS_PER_RECORD_MAX = 253
"""What the kernel lets one record carry (SCM_MAX_FD)."""


class Record(NamedTuple):
    """What `recv_fds` received; the descriptors are close-on-exec and the caller's to close."""

    payload: bytes
    descriptors: list[int]


def send_fds(sock: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    """Send one record. The descriptors stay the caller's and may be closed at once.

    Raises OSError as `socket.sendmsg` does, BlockingIOError included: nothing was sent then.
    Raises ValueError for an empty payload, which would read as the end of the connection, and for
    more than FDS_PER_RECORD_MAX descriptors.
    """
    _require_records(sock)
    if not payload:
        raise ValueError("a record needs a payload")
    if len(descriptors) > FDS_PER_RECORD_MAX:
        raise ValueError(
            f"{len(descriptors)} descriptors in a record: at most {FDS_PER_RECORD_MAX}"
        )
    socket.send_fds(sock, [payload], list(descriptors))


def recv_fds(sock: socket.socket, payload_bytes_max: int, descriptors_max: int) -> Record:
    """Receive one record; an empty payload without descriptors is the end of the connection.

    Raises OSError as `socket.recvmsg` does, BlockingIOError included. Raises SwiftCacheError for a
    record over either limit, or one whose descriptors this process has no room for; all that came
    with it are closed then, and the next record can be received.
    """
    _require_records(sock)
    item_bytes = array.array("i").itemsize
    payload, ancillary, flags, _ = sock.recvmsg(
        payload_bytes_max,
        socket.CMSG_SPACE(descriptors_max * item_bytes),
        socket.MSG_CMSG_CLOEXEC,
    )
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(data[: len(data) - len(data) % item_bytes])
            descriptors.extend(received)
    problem = None
    # The kernel rounds the room for descriptors up, so one too many may arrive unmarked.
    if flags & socket.MSG_CTRUNC or len(descriptors) > descriptors_max:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        problem = (
            f"carries more than the {descriptors_max} descriptors expected, or more than this "
            f"process may still open of its {limit} (ulimit -n)"
        )
    elif flags & socket.MSG_TRUNC:
        problem = f"is longer than the {payload_bytes_max} bytes expected"
    if problem is not None:
        for descriptor in descriptors:
            os.close(descriptor)
        raise SwiftCacheError(
            f"a record of descriptors {problem}: it was dropped; check that both sides run the "
            f"same version, and the limit on open files"
        )
    return Record(payload, descriptors)


def _require_records(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise ValueError(f"{sock!r} does not keep records apart: use AF_UNIX, SOCK_SEQPACKET")
