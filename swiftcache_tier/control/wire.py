"""ZeroMQ sockets as donors and receivers use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import zmq
import zmq.asyncio

from swiftcache_tier.settings import Settings

# Longer messages than are legal are still received, so that their sender can be told; beyond this
# ZeroMQ itself closes the connection before the message takes up memory.
_RECEIVED_BYTES_MAX_FACTOR = 2


def open_socket(context: zmq.asyncio.Context, kind: int, settings: Settings) -> zmq.asyncio.Socket:
    """A socket that holds a bounded number of messages of bounded size for each peer."""
    socket = context.socket(kind)
    socket.maxmsgsize = _RECEIVED_BYTES_MAX_FACTOR * settings.message_bytes_max
    socket.sndhwm = settings.queued_messages_max
    socket.rcvhwm = settings.queued_messages_max
    socket.linger = 0
    return socket


def send_or_drop(socket: zmq.asyncio.Socket, frames: Sequence[bytes]) -> None:
    """Send now, or not at all if the queue is full: what matters is repeated at a heartbeat."""
    # With NOBLOCK this is a future, and done.
    sent = cast("asyncio.Future[None]", socket.send_multipart(frames, flags=zmq.NOBLOCK))
    error = sent.exception()
    if error is not None and not isinstance(error, zmq.Again):
        raise error
