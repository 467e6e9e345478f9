"""The attack on a donor's door."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import deque
from pathlib import Path

from fuzz.inputs import Inputs, make_descriptor, too_long_for_a_record
from swiftcache_tier.control.messages import (
    FROM_DOOR,
    PROTOCOL,
    DrainRequest,
    Hello,
    LimitRequest,
    StatusRequest,
    encode,
)
from swiftcache_tier.extents import recv_fds
from swiftcache_tier.settings import Settings

ANSWER_DEADLINE_S = 60.0
HELD_MAX = 24
EXTENT_BYTES = 4096


def attack_door(door: Path, inputs: int, seed: str, settings: Settings) -> int:
    """Send `inputs` records. Raises TimeoutError when one is not answered or shown out, and
    ValueError when the answer is no message."""
    made = Inputs(
        [
            Hello(PROTOCOL, "fuzz"),
            StatusRequest(PROTOCOL),
            LimitRequest(PROTOCOL, bytes=1 << 20),
            LimitRequest(PROTOCOL, bytes=None, receiver="fuzz"),
            DrainRequest(PROTOCOL),
        ],
        settings.message_bytes_max,
        seed,
    )
    held: deque[socket.socket] = deque()
    sent = 0
    while sent < inputs:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(ANSWER_DEADLINE_S)
        connection.connect(str(door))
        sent += 1
        try:
            keep = _use(connection, made)
        except (ConnectionError, BrokenPipeError):
            keep = False  # shown out
        if keep:
            held.append(connection)
        else:
            connection.close()
        if len(held) > HELD_MAX:
            held.popleft().close()
    for connection in held:
        connection.close()
    return sent


def _use(connection: socket.socket, made: Inputs) -> bool:
    """One connection. Returns whether to keep it open and be silent."""
    rng = made.rng
    way = rng.random()
    if way < 0.02:
        return True
    if way < 0.04:
        connection.sendall(encode(Hello(PROTOCOL, "fuzz")))
        _answer(connection)
        with too_long_for_a_record():
            connection.sendall(made.make())
        return True
    descriptors = _descriptors(rng) if way < 0.2 else []
    try:
        socket.send_fds(connection, [made.make()], descriptors)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        return False  # the kernel refused it: too long for a record
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if way < 0.3:
        return False  # closed at once, the answer unread
    _answer(connection)
    return False


def _answer(connection: socket.socket) -> None:
    record = recv_fds(connection, 1 << 16, 253)
    for descriptor in record.descriptors:
        os.close(descriptor)
    if record.payload:
        FROM_DOOR.decode(record.payload)


def _descriptors(rng: random.Random) -> list[int]:
    return [make_descriptor(rng, EXTENT_BYTES) for _ in range(rng.choice((1, 1, 2, 9, 64)))]
