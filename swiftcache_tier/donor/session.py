"""The way to one receiver, as the donor has it."""

from __future__ import annotations

import asyncio
import logging
import os

from swiftcache_tier.control.credentials import Peer
from swiftcache_tier.control.messages import Offer, ToReceiver, Welcome, encode
from swiftcache_tier.control.records import RecordChannel, process_end
from swiftcache_tier.donor.control_socket import ControlSocket
from swiftcache_tier.donor.lender import Lender
from swiftcache_tier.donor.store import Shared
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.lease import Grant

logger = logging.getLogger(__name__)


class Session:
    """One receiver's connection, process and place on the control socket: a `Port` of `Lender`.

    Takes over the connection and the descriptor in `peer`. Used on the event loop's thread.
    """

    def __init__(
        self,
        token: str,
        peer: Peer,
        channel: RecordChannel,
        control: ControlSocket,
        lender: Lender,
        store: Shared,
    ) -> None:
        self.address: bytes | None = None
        """Of the receiver on the control socket; None until it has spoken there."""
        self._token = token
        self._peer = peer
        self._channel = channel
        self._control = control
        self._lender = lender
        self._store = store
        self._grants: asyncio.Queue[Grant] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, group: asyncio.TaskGroup, welcome: Welcome) -> asyncio.Task[None]:
        """Serve the receiver until its process ends or the session is closed."""
        self._task = group.create_task(self._run(welcome))
        return self._task

    def offer(self, grant: Grant) -> None:
        self._grants.put_nowait(grant)

    def tell(self, message: ToReceiver) -> None:
        if self.address is not None:
            self._control.send(self.address, message)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, welcome: Welcome) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                door = group.create_task(self._serve_door(welcome))
                await process_end(self._peer.pidfd)
                door.cancel()
        finally:
            self._channel.close()
            os.close(self._peer.pidfd)
        self._lender.gone(self._token, asyncio.get_running_loop().time())

    async def _serve_door(self, welcome: Welcome) -> None:
        """Hand descriptors over until the receiver closes its end, or nothing can be sent."""
        async with asyncio.TaskGroup() as group:
            work = [
                group.create_task(self._hand_over(welcome)),
                group.create_task(self._until_closed()),
            ]
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                task.cancel()
        self._channel.close()
        self._lender.door_closed(self._token, asyncio.get_running_loop().time())

    async def _until_closed(self) -> None:
        try:
            record = await self._channel.receive()
        except (OSError, SwiftCacheError) as error:
            logger.warning("process %d: its connection failed: %s", self._peer.pid, error)
            return
        for descriptor in record.descriptors:
            os.close(descriptor)
        if record.payload:
            logger.warning(
                "process %d sent %d bytes at the door of a session, where nothing is expected: "
                "its connection is closed",
                self._peer.pid,
                len(record.payload),
            )

    async def _hand_over(self, welcome: Welcome) -> None:
        try:
            await self._channel.send(encode(welcome))
            while True:
                grant = await self._grants.get()
                if self._lender.table.is_offered(grant):
                    await self._send_extents(grant)
        except ConnectionError:
            return
        except OSError as error:
            # No memory for a record, most likely.
            logger.error(
                "process %d: nothing can be sent to it, its connection is closed: %s",
                self._peer.pid,
                error,
            )

    async def _send_extents(self, grant: Grant) -> None:
        descriptors: list[int] = []
        try:
            for slot in grant.slots:
                descriptors.append(self._store.share(slot))
            offer = Offer(grant=grant.number, slots=list(grant.slots))
            await self._channel.send(encode(offer), descriptors)
        except ConnectionError:
            raise
        except OSError as error:
            # No room for more descriptors, most likely; the offer is withdrawn at its time-out.
            logger.error("%d extents could not be handed over: %s", len(grant.slots), error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
