"""The donor's control socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import zmq
import zmq.asyncio

from swiftcache_tier.control.complaints import Complaints
from swiftcache_tier.control.messages import (
    TO_DONOR,
    Error,
    ErrorCode,
    MessageError,
    ToDonor,
    ToReceiver,
    decode,
    encode,
)
from swiftcache_tier.control.wire import open_socket, send_or_drop
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)


class ControlSocket:
    """Reads what receivers send, and answers. Used on the event loop's thread."""

    def __init__(
        self,
        path: Path,
        mode: int,
        uids: Iterable[int],
        settings: Settings,
        hear: Callable[[bytes, ToDonor], ToReceiver | None],
    ) -> None:
        """Listens at `path`, to processes of the users `uids` alone.

        `hear(address, message)` returns the answer or raises MessageError; `address` is where
        `send` reaches the sender.
        """
        self._settings = settings
        self._hear = hear
        self._complaints = Complaints(logger)
        self._context = zmq.asyncio.Context()
        self._socket = open_socket(self._context, zmq.ROUTER, settings)
        for uid in uids:
            self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        self._socket.bind(f"ipc://{path}")
        path.chmod(mode)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            address, *frames = await self._socket.recv_multipart()
            answer = self._answer(address, frames)
            if answer is not None:
                self.send(address, answer)
            # A peer that sends without pause must not keep the loop from everything else.
            await asyncio.sleep(0)

    def send(self, address: bytes, message: ToReceiver) -> None:
        """Send, or drop if that peer's queue is full or it is gone."""
        send_or_drop(self._socket, [address, encode(message)])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _answer(self, address: bytes, frames: list[bytes]) -> ToReceiver | None:
        try:
            if len(frames) != 1:
                raise MessageError(
                    ErrorCode.MALFORMED, f"message of {len(frames)} frames: expected 1"
                )
            message = decode(TO_DONOR, frames[0], self._settings.message_bytes_max)
            return self._hear(address, message)
        except MessageError as error:
            self._complaints.note(address, f"answered a control message with an error: {error}")
            return Error(code=error.code, message=str(error))
