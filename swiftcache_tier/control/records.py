"""One connection at a donor's door, on an asyncio loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

from swiftcache_tier.extents import Record, recv_fds, send_fds


class RecordChannel:
    """Sends and receives whole records, descriptors included, without blocking the loop.

    At most one `receive` and one `send` are in progress at a time. Used on the loop's thread.
    """

    def __init__(self, connection: socket.socket, payload_bytes_max: int, fds_max: int) -> None:
        """Takes over `connection`, which is non-blocking."""
        self._connection = connection
        self._payload_bytes_max = payload_bytes_max
        self._fds_max = fds_max

    async def receive(self) -> Record:
        """The next record; an empty payload is the end of the connection.

        Raises OSError, and SwiftCacheError as `recv_fds` does.
        """
        while True:
            try:
                return recv_fds(self._connection, self._payload_bytes_max, self._fds_max)
            except BlockingIOError:
                await readable(self._connection.fileno())

    async def send(self, payload: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send one record; waits while the peer does not read. Raises OSError."""
        while True:
            try:
                return send_fds(self._connection, payload, descriptors)
            except BlockingIOError:
                await writable(self._connection.fileno())

    def close(self) -> None:
        """May be repeated. Nothing may be in progress."""
        self._connection.close()


async def readable(descriptor: int) -> None:
    """Return when `descriptor` can be read."""
    loop = asyncio.get_running_loop()
    await _ready(descriptor, loop.add_reader, loop.remove_reader)


async def writable(descriptor: int) -> None:
    """Return when `descriptor` can be written."""
    loop = asyncio.get_running_loop()
    await _ready(descriptor, loop.add_writer, loop.remove_writer)


async def process_end(pidfd: int) -> None:
    """Return when the process behind `pidfd` has ended."""
    # A copy, so that one process may be watched from two places: a loop has one reader for each
    # descriptor.
    descriptor = os.dup(pidfd)
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)


async def _ready(
    descriptor: int, watch: Callable[..., None], unwatch: Callable[[int], bool]
) -> None:
    ready = asyncio.Event()
    watch(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        unwatch(descriptor)
