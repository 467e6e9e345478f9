"""The attack on a donor's control socket, by somebody who may have a session."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from fuzz.inputs import Inputs
from swiftcache_tier.control.messages import (
    FROM_DOOR,
    PROTOCOL,
    TO_RECEIVER,
    Accept,
    Bye,
    Decline,
    Farewell,
    Hello,
    Offer,
    Ping,
    Released,
    ToDonor,
    Welcome,
    encode,
)
from swiftcache_tier.extents import recv_fds, send_fds
from swiftcache_tier.settings import Settings

ANSWER_DEADLINE_S = 60.0
REPEAT_S = 2.0
BATCH = 100
"""Inputs between two answers that are waited for; fewer than a donor keeps for one peer."""


def attack_control(door: Path, control: Path, inputs: int, seed: str, settings: Settings) -> int:
    """Send `inputs` messages. Raises TimeoutError when the donor stops answering, and ValueError
    for an answer that is no message."""
    with ExitStack() as cleanup:
        session = cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        session.settimeout(ANSWER_DEADLINE_S)
        session.connect(str(door))
        token = _join(session)
        context = cleanup.enter_context(zmq.Context())
        made = Inputs(_messages(token), settings.message_bytes_max, seed)
        dealer = _dealer(context, control)
        sent = 0
        while sent < inputs:
            for _ in range(min(BATCH, inputs - sent)):
                _send(dealer, control, made)
                sent += 1
            _wait_for_farewell(dealer)
            _take_offers(session, made, token)
            if made.rng.random() < 0.1:
                dealer.close(linger=0)
                dealer = _dealer(context, control)
        dealer.close(linger=0)
    return sent


def _join(session: socket.socket) -> str:
    send_fds(session, encode(Hello(PROTOCOL, "fuzz")), ())
    welcome = FROM_DOOR.decode(recv_fds(session, 1 << 16, 253).payload)
    if not isinstance(welcome, Welcome):
        raise ValueError(f"no session: {welcome}")
    return welcome.token


def _messages(token: str) -> list[ToDonor]:
    found: list[ToDonor] = []
    for holder in (token, token, "0" * 32, ""):
        found += [
            Ping(holder, 2, link="host", gb_per_s=20.0),
            Accept(holder, 1, [0, 1]),
            Decline(holder, 2, [1]),
            Released(holder, 1, [0, 1, 2, 3]),
        ]
    # No Bye: it would end the attack's session, and its answer is what the attack waits for.
    return found


def _dealer(context: zmq.Context[zmq.Socket[bytes]], control: Path) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.rcvtimeo = int(REPEAT_S * 1000)
    dealer.sndtimeo = int(ANSWER_DEADLINE_S * 1000)
    dealer.connect(f"ipc://{control}")
    return dealer


def _send(dealer: zmq.Socket[bytes], control: Path, made: Inputs) -> None:
    way = made.rng.random()
    if way < 0.005:
        _send_raw(control, made)
    elif way < 0.05:
        dealer.send_multipart([made.make() for _ in range(made.rng.randint(2, 5))])
    else:
        dealer.send(made.make())


def _send_raw(control: Path, made: Inputs) -> None:
    """Bytes that are not even ZeroMQ's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.settimeout(ANSWER_DEADLINE_S)
        with suppress(ConnectionError, BlockingIOError):
            raw.connect(str(control))
            raw.sendall(made.make())


def _wait_for_farewell(dealer: zmq.Socket[bytes]) -> None:
    """All before it has been read by then: messages of one peer are answered in their order."""
    end = time.monotonic() + ANSWER_DEADLINE_S
    while time.monotonic() < end:
        # Again and again: what follows a message that is far too long is lost with the connection.
        dealer.send(encode(Bye(os.urandom(16).hex())))
        with suppress(zmq.Again):
            while not isinstance(TO_RECEIVER.decode(dealer.recv()), Farewell):
                pass
            return
    raise TimeoutError(f"no answer for {ANSWER_DEADLINE_S:g} s")


def _take_offers(session: socket.socket, made: Inputs, token: str) -> None:
    """Let the attack know the grants that it was offered; the extents are not mapped."""
    session.setblocking(False)
    with suppress(BlockingIOError):
        while record := recv_fds(session, 1 << 16, 253):
            for descriptor in record.descriptors:
                os.close(descriptor)
            if not record.payload:
                return
            offer = FROM_DOOR.decode(record.payload)
            if isinstance(offer, Offer):
                made.add(Accept(token, offer.grant, list(offer.slots)))
                made.add(Released(token, offer.grant, list(offer.slots)))
