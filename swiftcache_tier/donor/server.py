"""What every donor has: a door, a control socket, sessions, and a lender that decides."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any

from swiftcache_tier.control.credentials import Peer, user_name
from swiftcache_tier.control.door import clear_door, take_door
from swiftcache_tier.control.messages import (
    PROTOCOL,
    AtDoor,
    DrainRequest,
    ErrorCode,
    Hello,
    LimitRequest,
    MessageError,
    StatusReply,
    StatusRequest,
    ToDonor,
    ToReceiver,
    Welcome,
)
from swiftcache_tier.control.records import RecordChannel
from swiftcache_tier.donor.control_socket import ControlSocket
from swiftcache_tier.donor.lender import Lender
from swiftcache_tier.donor.parties import Engine, Receiver
from swiftcache_tier.donor.plan import DonorPlan
from swiftcache_tier.donor.reception import Reception
from swiftcache_tier.donor.session import Session
from swiftcache_tier.donor.store import Shared
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)

_PRIVATE = 0o600
_OPEN = 0o666  # who may do what is decided by credentials, but connecting takes write permission


class DonorServer:
    """Wires door, control socket, memory and the lender's decisions to one loop.

    What is scrubbed by whom, and when it all ends, is for subclasses.
    """

    def __init__(
        self,
        plan: DonorPlan,
        settings: Settings,
        parts: ExitStack,
        *,
        make_memory: Callable[[ExitStack], Shared],
        engine: Engine | None = None,
    ) -> None:
        """Raises SwiftCacheError when the name is taken or the memory cannot be had."""
        mode = _OPEN if plan.others_allowed else _PRIVATE
        self._plan = plan
        self._settings = settings
        _allow_open_files(plan.open_files)
        door = take_door(
            plan.paths,
            backlog=settings.sessions_max,
            mode=mode,
            lock_timeout_s=settings.handshake_timeout_s,
            # A server's donor is named by its port.
            name_flag="--name" if engine is None else "--port",
        )
        parts.callback(self._clear_door)
        parts.callback(door.close)
        self._memory = make_memory(parts)
        self._control = ControlSocket(
            plan.paths.control, mode, plan.allowed_uids, settings, self._hear
        )
        parts.callback(self._control.close)
        self._lender = Lender(
            plan.extents, plan.extent_bytes, settings, self._dirtied, engine=engine
        )
        self._reception = Reception(door, plan.allowed_uids, settings, self._answer, self._welcome)
        self._sessions: dict[str, Session] = {}
        self._group = asyncio.TaskGroup()
        self._ending = asyncio.Event()
        self._drained = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until `_ending` is set, then take everything back."""
        async with self._group as group:
            services = [group.create_task(service) for service in self._services()]
            ready()
            await self._ending.wait()
            await self._drain()
            for session in self._sessions.values():
                session.close()
            for service in services:
                service.cancel()

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        return [self._reception.run(), self._control.run(), self._tick()]

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        self._lender.drain(loop.time())
        self._note_drained()
        try:
            async with asyncio.timeout(self._settings.reclaim_deadline_s):
                await self._drained.wait()
        except TimeoutError:
            pass
        held = self._plan.extents - self._lender.table.counts()[LeaseState.FREE]
        logger.info(
            "ended; %d extents (%s) are still with receivers, and return to the system when they "
            "unmap them",
            held,
            format_size(held * self._plan.extent_bytes),
        )

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            self._lender.tick(loop.time())

    def _clear_door(self) -> None:
        # A successor may have taken the place since this one closed its socket. What cannot be
        # removed now is for the next of that name to replace.
        with suppress(OSError, SwiftCacheError):
            clear_door(self._plan.paths, lock_timeout_s=self._settings.handshake_timeout_s)

    def _dirtied(self) -> None:
        self._note_drained()

    def _note_drained(self) -> None:
        if self._lender.draining and self._lender.idle:
            self._drained.set()

    def _hear(self, address: bytes, message: ToDonor) -> ToReceiver | None:
        session = self._sessions.get(message.token)
        if session is not None:
            session.address = address
        return self._lender.hear(message, asyncio.get_running_loop().time())

    def _welcome(self, hello: Hello, peer: Peer, channel: RecordChannel) -> None:
        plan = self._plan
        if plan.owner is not None and plan.owner.pid != peer.pid:
            raise MessageError(
                ErrorCode.OWNED,
                f"this donor serves process {plan.owner.pid} alone: choose another, or start one "
                f"(swiftcache donor)",
            )
        token = secrets.token_hex(16)
        session = Session(token, peer, channel, self._control, self._lender, self._memory)
        self._lender.join(
            Receiver(
                token=token,
                name=hello.receiver,
                pid=peer.pid,
                uid=peer.uid,
                port=session,
                heard_s=asyncio.get_running_loop().time(),
            )
        )
        welcome = Welcome(
            protocol=PROTOCOL,
            name=plan.paths.name,
            device=plan.arena.device,
            device_uuid=plan.arena.uuid,
            extent_bytes=plan.extent_bytes,
            extents=plan.extents,
            token=token,
            lost_after_s=self._settings.lost_after_s,
            owner_pid=plan.owner.pid if plan.owner else None,
            elastic=self._lender.is_elastic,
        )
        self._sessions[token] = session
        task = session.start(self._group, welcome)
        task.add_done_callback(lambda _: self._sessions.pop(token))

    def _answer(self, message: AtDoor, peer: Peer) -> StatusReply:
        if not isinstance(message, StatusRequest) and peer.uid not in (os.geteuid(), 0):
            raise MessageError(
                ErrorCode.NOT_YOURS,
                f"only user {user_name(os.geteuid())}, who runs this donor, may limit or drain it: "
                f"run the command as that user",
            )
        now_s = asyncio.get_running_loop().time()
        match message:
            case LimitRequest():
                extents = None
                if message.bytes is not None:
                    extents = message.bytes // self._plan.extent_bytes
                self._lender.limit(message.receiver, message.each, extents, now_s)
            case DrainRequest():
                self._lender.drain_for_operator(now_s)
        return self._status()

    def _status(self) -> StatusReply:
        plan, lender = self._plan, self._lender
        limits, size = lender.limits, plan.extent_bytes
        state = "draining" if lender.draining else "drained" if lender.drained else "serving"
        return StatusReply(
            protocol=PROTOCOL,
            name=plan.paths.name,
            device=plan.arena.device,
            device_uuid=plan.arena.uuid,
            device_model=plan.arena.model,
            pid=os.getpid(),
            owner_pid=plan.owner.pid if plan.owner else None,
            state=state,
            extent_bytes=plan.extent_bytes,
            extents={str(state): n for state, n in lender.table.counts().items()},
            bytes_untaken=self._bytes_untaken(),
            receivers=lender.receivers(asyncio.get_running_loop().time()),
            kept=lender.table.kept,
            elastic=lender.is_elastic,
            limit_bytes=None if limits.total is None else limits.total * size,
            each_limit_bytes=None if limits.each is None else limits.each * size,
            receiver_limit_bytes={name: n * size for name, n in limits.by_name.items()},
        )

    def _bytes_untaken(self) -> int:
        """Promised and not yet taken from the system."""
        return 0


def _allow_open_files(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
