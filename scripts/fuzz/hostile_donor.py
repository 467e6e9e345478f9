"""The attack on a receiver: a donor that says and hands over what no donor would."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress

import zmq

from fuzz.inputs import Inputs, make_descriptor, too_long_for_a_record
from swiftcache_tier.control.messages import (
    AT_DOOR,
    FROM_DOOR,
    PROTOCOL,
    TO_DONOR,
    Bye,
    Error,
    Farewell,
    Hello,
    Offer,
    Pong,
    Reclaim,
    Welcome,
    encode,
)
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.extents import recv_fds, send_fds
from swiftcache_tier.settings import Settings

DEADLINE_S = 60.0
INPUTS_PER_SESSION = 120
EXTENTS = 8
EXTENT_BYTES = 1 << 20
ANSWER_PAUSE_S = 0.05


def attack_receiver(paths: DonorPaths, inputs: int, seed: str, settings: Settings) -> int:
    """Send `inputs` records and messages, in as many sessions as that takes.

    Raises TimeoutError when the receiver does not come, or does not leave a donor that it lost.
    """
    sent = session = 0
    while sent < inputs:
        made = Inputs(_messages(paths), settings.message_bytes_max, f"{seed}/{session}")
        sent += _session(paths, made, min(INPUTS_PER_SESSION, inputs - sent))
        session += 1
    return sent


def _session(paths: DonorPaths, made: Inputs, inputs: int) -> int:
    with ExitStack() as cleanup:
        context = cleanup.enter_context(zmq.Context())
        router = cleanup.enter_context(context.socket(zmq.ROUTER))
        router.linger = 0
        router.bind(f"ipc://{paths.control}")
        door = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        door.settimeout(DEADLINE_S)
        # Another one each time: a receiver does not come back to a door where it was told nonsense.
        cleanup.callback(paths.door.unlink, missing_ok=True)
        door.bind(str(paths.door))
        door.listen()
        connection, _ = door.accept()
        with connection:
            connection.settimeout(DEADLINE_S)
            AT_DOOR.decode(recv_fds(connection, 1 << 16, 0).payload)
            opening = made.make() if made.rng.random() < 0.5 else encode(_welcome(paths))
            with suppress(ConnectionError), too_long_for_a_record():
                connection.sendall(opening)
            sent = 1
            address = _first_ping(router, connection) if _opens_a_session(opening) else None
            if address is None:
                return sent
            with suppress(ConnectionError):
                while sent < inputs:
                    sent += 1
                    if made.rng.random() < 0.5:
                        _hand_over(connection, made)
                    else:
                        router.send_multipart([address, *_frames(made)], flags=zmq.NOBLOCK)
        _let_it_leave(router)
    return sent


def _opens_a_session(answer: bytes) -> bool:
    try:
        return isinstance(FROM_DOOR.decode(answer), Welcome)
    except ValueError:  # msgspec's errors are
        return False


def _messages(paths: DonorPaths) -> list[object]:
    slots = list(range(EXTENTS))
    return [
        _welcome(paths),
        Offer(1, slots),
        Offer(2, slots[:2]),
        Offer(3, [0]),
        Pong(EXTENTS),
        Reclaim(1, slots, 1.0, "fuzz"),
        Reclaim(3, [0, 7], 0.0, "fuzz"),
        Error(code="malformed", message="fuzz"),
        Hello(PROTOCOL, "fuzz"),
    ]


def _welcome(paths: DonorPaths) -> Welcome:
    return Welcome(
        protocol=PROTOCOL,
        name=paths.name,
        device="host",
        device_uuid=None,
        extent_bytes=EXTENT_BYTES,
        extents=EXTENTS,
        token="0" * 32,
        lost_after_s=5.0,
        owner_pid=None,
    )


def _first_ping(router: zmq.Socket[bytes], connection: socket.socket) -> bytes | None:
    """The receiver's address; None when it closes the connection instead."""
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(connection, zmq.POLLIN)
    ready = dict(poller.poll(int(DEADLINE_S * 1000)))
    if router in ready:
        return router.recv_multipart()[0]
    if not ready:
        raise TimeoutError(f"the receiver said nothing for {DEADLINE_S:g} s")
    return None  # it says nothing at the door after Hello, so this is the end


def _frames(made: Inputs) -> list[bytes]:
    return [made.make() for _ in range(2 if made.rng.random() < 0.05 else 1)]


def _hand_over(connection: socket.socket, made: Inputs) -> None:
    rng = made.rng
    right = Offer(rng.randint(1, 50), rng.sample(range(EXTENTS), rng.randint(1, EXTENTS)))
    payload = encode(right) if rng.random() < 0.5 else made.make()
    count = rng.choice((0, 1, len(right.slots), 9, 253))
    descriptors = [make_descriptor(rng, EXTENT_BYTES) for _ in range(count)]
    try:
        with too_long_for_a_record():
            send_fds(connection, payload, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _let_it_leave(router: zmq.Socket[bytes]) -> None:
    """Answer the receiver until it has left: it holds on to a session that is not ended."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if not router.poll(int(ANSWER_PAUSE_S * 1000)):
            continue
        address, *frames = router.recv_multipart()
        if frames and isinstance(TO_DONOR.decode(frames[0]), Bye):
            router.send_multipart([address, encode(Farewell())])
            time.sleep(ANSWER_PAUSE_S)
            return
    raise TimeoutError(f"the receiver has not left for {DEADLINE_S:g} s")
