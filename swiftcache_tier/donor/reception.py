"""The donor's door: who is let in."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from swiftcache_tier.control.complaints import Complaints
from swiftcache_tier.control.credentials import Peer, credentials_of, peer_of, user_name
from swiftcache_tier.control.messages import (
    AT_DOOR,
    AtDoor,
    Error,
    ErrorCode,
    Hello,
    MessageError,
    StatusReply,
    check_protocol,
    decode,
    encode,
)
from swiftcache_tier.control.records import RecordChannel, readable
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)


class Reception:
    """Accepts connections, checks credentials, hears the first message."""

    def __init__(
        self,
        door: socket.socket,
        allowed_uids: frozenset[int],
        settings: Settings,
        answer: Callable[[AtDoor, Peer], StatusReply],
        welcome: Callable[[Hello, Peer, RecordChannel], None],
    ) -> None:
        """Takes over `door`, which listens and does not block.

        `welcome` takes over the connection and the descriptor in `peer`; `answer` is for all else
        that is said at the door. Both may raise MessageError.
        """
        self._door = door
        self._allowed_uids = allowed_uids
        self._settings = settings
        self._answer = answer
        self._welcome = welcome
        self._waiting: set[asyncio.Task[None]] = set()
        self._waiting_of: Counter[int] = Counter()
        """Connections that are being heard out, by process."""
        self._complaints = Complaints(logger)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await readable(self._door.fileno())
                await self._accept()
        finally:
            for task in self._waiting:
                task.cancel()
            await asyncio.gather(*self._waiting, return_exceptions=True)

    def close(self) -> None:
        self._door.close()

    async def _accept(self) -> None:
        try:
            connection, _ = self._door.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no room for one more open file, most likely
            logger.error("a connection cannot be accepted: %s", error)
            await asyncio.sleep(self._settings.heartbeat_s)
            return
        connection.setblocking(False)
        pid, uid = credentials_of(connection)
        if uid not in self._allowed_uids:
            # before it speaks: a stranger that is silent would take a place until its time is up
            self._turn_away(connection, pid, uid)
            return
        if len(self._waiting) >= self._settings.sessions_max:
            self._complaints.note(
                None, f"a connection is refused: {len(self._waiting)} others wait"
            )
            connection.close()
            return
        task = asyncio.create_task(self._receive(connection))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _turn_away(self, connection: socket.socket, pid: int, uid: int) -> None:
        user = user_name(uid)
        refusal = (
            f"user {user} may not use this donor: start it with --allow-user {user}, or run "
            f"as the user that started it"
        )
        self._complaints.note(pid, f"refused process {pid}: {refusal}")
        with connection, suppress(OSError):  # it may be gone
            # Closing a connection with a message unread would lose the answer to it.
            connection.shutdown(socket.SHUT_RD)
            while connection.recv(1):
                pass
            connection.send(encode(Error(code=ErrorCode.NOT_ALLOWED, message=refusal)))

    async def _receive(self, connection: socket.socket) -> None:
        channel = RecordChannel(connection, self._settings.message_bytes_max, 0)
        peer: Peer | None = None
        kept = False
        try:
            peer = peer_of(connection)
            self._waiting_of[peer.pid] += 1
            if self._waiting_of[peer.pid] > self._settings.sessions_per_process_max:
                self._complaints.note(
                    peer.pid,
                    f"a connection of process {peer.pid} is refused: "
                    f"{self._waiting_of[peer.pid] - 1} others of it wait",
                )
                return
            async with asyncio.timeout(self._settings.handshake_timeout_s):
                try:
                    kept = await self._hear(peer, channel)
                except MessageError as error:
                    self._complaints.note(peer.pid, f"refused process {peer.pid}: {error}")
                    await channel.send(encode(Error(code=error.code, message=str(error))))
        except TimeoutError:
            patience_s = self._settings.handshake_timeout_s
            self._complaints.note(
                peer and peer.pid, f"a connection is closed: it said nothing for {patience_s:.1f} s"
            )
        except (OSError, SwiftCacheError) as error:
            self._complaints.note(peer and peer.pid, f"a connection is closed: {error}")
        finally:
            if peer is not None:
                self._waiting_of[peer.pid] -= 1
                if not self._waiting_of[peer.pid]:
                    del self._waiting_of[peer.pid]
            if not kept:
                channel.close()
                if peer is not None:
                    os.close(peer.pidfd)

    async def _hear(self, peer: Peer, channel: RecordChannel) -> bool:
        """Answer the first message. Returns whether the connection has become a session's."""
        try:
            record = await channel.receive()
        except SwiftCacheError as error:
            raise MessageError(ErrorCode.TOO_LARGE, str(error)) from error
        if not record.payload:
            return False
        check_protocol(record.payload, f"process {peer.pid}")
        message = decode(AT_DOOR, record.payload, self._settings.message_bytes_max)
        if isinstance(message, Hello):
            self._welcome(message, peer, channel)
            return True
        await channel.send(encode(self._answer(message, peer)))
        return False
