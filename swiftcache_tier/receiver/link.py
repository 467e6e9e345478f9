"""One donor, as the receiver's control thread sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from enum import StrEnum
from typing import NoReturn

import zmq
import zmq.asyncio

from swiftcache_tier.control.complaints import Complaints
from swiftcache_tier.control.messages import (
    FROM_DOOR,
    TO_RECEIVER,
    Accept,
    Bye,
    Decline,
    Error,
    ErrorCode,
    Farewell,
    MessageError,
    Offer,
    Ping,
    Pong,
    Reclaim,
    Released,
    ToDonor,
    decode,
    encode,
)
from swiftcache_tier.control.records import process_end
from swiftcache_tier.control.wire import open_socket, send_or_drop
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Record
from swiftcache_tier.receiver.events import (
    BandwidthMeasured,
    DonorLost,
    Event,
    ExtentsMapped,
    ReclaimAsked,
)
from swiftcache_tier.receiver.greeting import Greeting
from swiftcache_tier.receiver.lent import LentExtents
from swiftcache_tier.receiver.reach import Reach
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import count_extents, format_size

logger = logging.getLogger(__name__)


class LinkState(StrEnum):
    """Of a link; it only moves on."""

    JOINED = "joined"
    LOST = "lost"  # its memory is to be vacated
    LEAVING = "leaving"  # nothing is mapped; the donor has yet to hear so


class _Lost(Exception):
    """The donor is lost; the text says how that showed."""


class DonorLink:
    """Maps what a donor offers, answers it, and tells the scheduler thread by events.

    Used by the control thread; other threads may read the public attributes and `lent.held`.
    """

    def __init__(
        self,
        key: int,
        greeting: Greeting,
        lent: LentExtents,
        reach: Reach,
        context: zmq.asyncio.Context,
        settings: Settings,
        emit: Callable[[Event], None],
    ) -> None:
        """Takes over `greeting`."""
        self.key = key
        self.paths = greeting.paths
        self.lent = lent
        self.state = LinkState.JOINED
        self.heard_s = asyncio.get_running_loop().time()
        self.donor_ended = False
        """Its process is known to have ended, so another may come at the same place."""
        self.is_elastic = greeting.welcome.elastic
        """The donor is a serving engine: what it lends comes and goes with its own load."""
        self.progress = 0
        """Rises with every step of mapping and unmapping."""
        self._greeting = greeting
        self._reach = reach
        self._measured = False
        self._gb_per_s: float | None = None
        self._token = greeting.welcome.token
        self._complaints = Complaints(logger)
        self._settings = settings
        self._emit = emit
        self._target = 0
        self._settled = asyncio.Event()
        self._leave_asked = asyncio.Event()
        self._forgotten = asyncio.Event()
        self._released = asyncio.Event()
        self._context = context
        self._socket = self._connect()

    def __str__(self) -> str:
        return f"donor {self._greeting.welcome.name} (process {self._greeting.peer.pid})"

    async def run(self) -> None:
        """Serve the link to its end: donor lost, memory vacated, donor told.

        Raises SwiftCacheError when memory stays mapped because the system refuses to unmap it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                unmapping = group.create_task(self._unmap_released())
                await self._lose(await self._serve())
                unmapping.cancel()
            await self._leave()
        finally:
            self._settled.set()
            self._socket.close()
            self._greeting.close()

    async def settled(self) -> None:
        """Return once the donor has granted what it means to, or the link is over."""
        await self._settled.wait()

    def release(self, slots: list[int]) -> None:
        """Nothing uses these slots any more: they will be unmapped, and the donor told."""
        self.lent.release(slots)
        self._released.set()

    def forget(self) -> None:
        """Nothing of this donor, which is lost, is in use any more."""
        self._forgotten.set()

    def leave(self) -> None:
        """End the link from this side. Nothing of the donor may be in use any more."""
        self._leave_asked.set()
        self._forgotten.set()

    async def _serve(self) -> str:
        """Serve until the donor is lost; returns how that showed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_door())
                group.create_task(self._watch_control())
                group.create_task(self._watch_process())
                group.create_task(self._beat())
                group.create_task(self._watch_leave())
        except* _Lost as lost:
            reason = str(lost.exceptions[0])
        return reason

    async def _lose(self, reason: str) -> None:
        """The donor is lost; returns once nothing of it is in use any more."""
        self.state = LinkState.LOST
        self.lent.lose()
        self._greeting.channel.close()  # so that the donor, if it runs, offers no more
        self._emit(DonorLost(self.key, reason))
        self._settled.set()
        async with asyncio.TaskGroup() as group:
            ended = group.create_task(self._note_end())
            await self._forgotten.wait()
            ended.cancel()

    async def _leave(self) -> None:
        """Unmap all and tell the donor, if it still runs."""
        self.state = LinkState.LEAVING
        self.lent.release_all()
        while self.lent.unmap_some():
            self.progress += 1
            await asyncio.sleep(0)
        if self.lent.held:
            # Without a word from here the donor keeps them until this process ends.
            raise SwiftCacheError(f"{self.lent.held} extents of {self} cannot be unmapped")
        async with asyncio.TaskGroup() as group:
            bye = group.create_task(self._say_bye())
            ended = group.create_task(self._note_end())
            await asyncio.wait([bye, ended], return_when=asyncio.FIRST_COMPLETED)
            bye.cancel()
            ended.cancel()

    async def _watch_leave(self) -> NoReturn:
        await self._leave_asked.wait()
        raise _Lost("this receiver ends")

    async def _watch_process(self) -> NoReturn:
        await self._note_end()
        raise _Lost("its process has ended")

    async def _note_end(self) -> None:
        await process_end(self._greeting.peer.pidfd)
        self.donor_ended = True

    async def _watch_door(self) -> NoReturn:
        while True:
            try:
                record = await self._greeting.channel.receive()
            except SwiftCacheError as error:
                # That offer comes again, under another grant, when its time is up.
                self._complaints.note(None, f"{self}: {error}")
                continue
            except OSError as error:
                raise _Lost(f"its connection failed: {error.strerror}") from error
            try:
                if not record.payload:
                    raise _Lost("it closed the connection")
                await self._take_offer(record)
            finally:
                for descriptor in record.descriptors:
                    os.close(descriptor)

    async def _watch_control(self) -> NoReturn:
        await self._read_control()
        raise _Lost("it has no session with this process any more")

    async def _beat(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        lost_after_s = self._settings.lost_after_s
        interval_s = min(self._settings.heartbeat_s, self._greeting.welcome.lost_after_s / 3)
        while True:
            self._measure_once()
            self._send(
                Ping(
                    token=self._token,
                    wanted=self._greeting.welcome.extents,
                    link=str(self._greeting.link),
                    gb_per_s=self._gb_per_s,
                )
            )
            self._released.set()  # for what could not be unmapped before
            slept_s = loop.time()
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            if now_s - slept_s > interval_s + lost_after_s / 2:
                # This process was stopped or starved; answers may wait to be read.
                self.heard_s = now_s
            elif now_s - self.heard_s > lost_after_s:
                raise _Lost(f"silent for {now_s - self.heard_s:.1f} s")

    async def _read_control(self) -> None:
        """Act on control messages until one says that there is no session."""
        while True:
            data = await self._socket.recv()
            try:
                message = decode(TO_RECEIVER, data, self._settings.message_bytes_max)
            except MessageError as error:
                self._complaints.note(None, f"{self}: {error}")
                continue
            self.heard_s = asyncio.get_running_loop().time()
            match message:
                case Pong():
                    self._target = message.target
                    self._note_settled()
                case Reclaim():
                    self._begin_reclaim(message)
                case Farewell():
                    return
                case Error(code=ErrorCode.NO_SESSION):
                    return
                case Error():
                    self._complaints.note(None, f"{self} answers an error: {message.message}")

    async def _take_offer(self, record: Record) -> None:
        try:
            offer = decode(FROM_DOOR, record.payload, self._settings.message_bytes_max)
        except MessageError as error:
            self._complaints.note(None, f"{self}: {error}")
            return
        if not isinstance(offer, Offer):
            self._complaints.note(None, f"{self} sent {type(offer).__name__} in a session")
            return
        for outcome in self.lent.offer(offer, record.descriptors):
            if outcome.decline:
                self._send(Decline(token=self._token, grant=offer.grant, slots=outcome.decline))
            if outcome.accept:
                self._send(Accept(token=self._token, grant=offer.grant, slots=outcome.accept))
            if outcome.mapped:
                self.progress += 1
                self._emit(ExtentsMapped(self.key, outcome.mapped))
                self._note_settled()
            await asyncio.sleep(0)

    def _measure_once(self) -> None:
        """Measure the way to the donor's memory, once, over an extent that it lent.

        The first time takes long, so it comes when the donor has granted what it means to, or at
        the next heartbeat: what else it offers is not to wait for it.
        """
        if self._measured or not self.lent.held:
            return
        self._measured = True
        extent_bytes = self._greeting.welcome.extent_bytes
        self._gb_per_s = self._reach.measure(self.lent.mapped_address(), extent_bytes)
        if self._gb_per_s is not None:
            logger.info("%s: %s, %.1f GB/s", self, self._greeting.link, self._gb_per_s)
            self._emit(BandwidthMeasured(self.key, self._gb_per_s))

    async def _unmap_released(self) -> NoReturn:
        """Unmap what was released and tell the donor; what the system refuses stays for later."""
        while True:
            await self._released.wait()
            self._released.clear()
            while unmapped := self.lent.unmap_some():
                self.progress += 1
                for grant, slots in unmapped.items():
                    self._send(Released(token=self._token, grant=grant, slots=slots))
                await asyncio.sleep(0)

    def _begin_reclaim(self, message: Reclaim) -> None:
        answer = self.lent.reclaim(message)
        if answer.released:
            self._send(Released(token=self._token, grant=message.grant, slots=answer.released))
        if answer.vacate:
            bytes_asked = len(answer.vacate) * self._greeting.welcome.extent_bytes
            logger.info(
                "%s asks %s (%s) back within %.1f s: %s",
                self,
                count_extents(len(answer.vacate)),
                format_size(bytes_asked),
                message.deadline_s,
                message.reason,
            )
            self._emit(
                ReclaimAsked(
                    self.key, answer.vacate, time.monotonic(), message.deadline_s, message.reason
                )
            )

    def _note_settled(self) -> None:
        if 0 < self._target <= self.lent.held:
            self._measure_once()
            self._settled.set()

    async def _say_bye(self) -> None:
        """Repeat Bye until the donor answers; it lends nothing of ours to others before.

        Over a new connection: ZeroMQ gives one up for good on which a message was far too long.
        """
        self._socket.close()
        self._socket = self._connect()
        answered = asyncio.create_task(self._read_control())
        try:
            while not answered.done():
                self._send(Bye(token=self._token))
                await asyncio.wait([answered], timeout=self._settings.heartbeat_s)
        finally:
            answered.cancel()

    def _connect(self) -> zmq.asyncio.Socket:
        socket = open_socket(self._context, zmq.DEALER, self._settings)
        socket.connect(f"ipc://{self.paths.control}")
        return socket

    def _send(self, message: ToDonor) -> None:
        if self.donor_ended:
            return  # another donor may listen at the same place by now
        send_or_drop(self._socket, [encode(message)])
