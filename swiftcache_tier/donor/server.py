"""The donor daemon: puts the parts together, and takes them apart again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack

from swiftcache_tier.control.credentials import Peer
from swiftcache_tier.control.door import leave_door, take_door
from swiftcache_tier.control.messages import (
    PROTOCOL,
    ErrorCode,
    Hello,
    MessageError,
    StatusReply,
    ToDonor,
    ToReceiver,
    Welcome,
)
from swiftcache_tier.control.records import RecordChannel, process_end
from swiftcache_tier.donor.control_socket import ControlSocket
from swiftcache_tier.donor.lender import Lender, Receiver
from swiftcache_tier.donor.owner import Owner
from swiftcache_tier.donor.plan import DonorPlan
from swiftcache_tier.donor.reception import Reception
from swiftcache_tier.donor.session import Session
from swiftcache_tier.donor.store import ExtentStore
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)

_PRIVATE = 0o600
_OPEN = 0o666  # who may do what is decided by credentials, but connecting takes write permission
_INTERRUPTED = 128 + signal.SIGINT


async def serve(plan: DonorPlan, settings: Settings, ready: Callable[[], None]) -> int:
    """Lend until a signal (TERM, INT, HUP) or the owner's end; then take everything back.

    Calls `ready` once receivers can join. Returns the exit status for the process. Raises
    SwiftCacheError when the donor cannot start. Its sockets are removed in any case.
    """
    with ExitStack() as parts:
        return await _Server(plan, settings, parts).run(ready)


class _Server:
    """Wires door, control socket, memory and the lender's decisions to one loop."""

    def __init__(self, plan: DonorPlan, settings: Settings, parts: ExitStack) -> None:
        mode = _OPEN if plan.others_allowed else _PRIVATE
        self._plan = plan
        self._settings = settings
        _allow_open_files(plan.open_files)
        door = take_door(
            plan.paths,
            backlog=settings.sessions_max,
            mode=mode,
            lock_timeout_s=settings.handshake_timeout_s,
        )
        parts.callback(leave_door, plan.paths)
        parts.callback(door.close)
        self._store = ExtentStore(plan.arena, plan.extent_bytes, plan.extents)
        parts.callback(self._store.close)
        self._control = ControlSocket(plan.paths.control, mode, settings, self._hear)
        parts.callback(self._control.close)
        self._lender = Lender(plan.extents, plan.extent_bytes, settings, self._dirtied)
        self._reception = Reception(door, plan.allowed_uids, settings, self._status, self._welcome)
        self._sessions: dict[str, Session] = {}
        self._group = asyncio.TaskGroup()
        self._dirty = asyncio.Event()
        self._ending = asyncio.Event()
        self._drained = asyncio.Event()
        self._exit_status = 0

    async def run(self, ready: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number)
        async with self._group as group:
            services = [
                group.create_task(self._reception.run()),
                group.create_task(self._control.run()),
                group.create_task(self._tick()),
                group.create_task(self._scrub()),
            ]
            if self._plan.owner is not None:
                services.append(group.create_task(self._end_with_owner(self._plan.owner)))
            ready()
            await self._ending.wait()
            await self._drain()
            for session in self._sessions.values():
                session.close()
            for service in services:
                service.cancel()
        return self._exit_status

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._ending.is_set():
            self._exit_status = _INTERRUPTED
            self._drained.set()
        self._ending.set()

    async def _end_with_owner(self, owner: Owner) -> None:
        await process_end(owner.pidfd)
        logger.info("the owner, process %d, has ended", owner.pid)
        self._ending.set()

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

    async def _scrub(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            while dirty := sorted(self._lender.table.dirty)[: self._settings.extents_per_message]:
                clean = await self._store.scrub(dirty)
                self._lender.scrubbed(clean, loop.time())
                if len(clean) < len(dirty):
                    await asyncio.sleep(self._settings.heartbeat_s)

    def _dirtied(self) -> None:
        self._dirty.set()
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
        session = Session(token, peer, channel, self._control, self._lender, self._store)
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
        )
        self._sessions[token] = session
        task = session.start(self._group, welcome)
        task.add_done_callback(lambda _: self._sessions.pop(token))

    def _status(self) -> StatusReply:
        plan, table = self._plan, self._lender.table
        taken_bytes = self._store.taken_bytes(set(range(plan.extents)) - table.dirty)
        return StatusReply(
            protocol=PROTOCOL,
            name=plan.paths.name,
            device=plan.arena.device,
            device_uuid=plan.arena.uuid,
            device_model=plan.arena.model,
            pid=os.getpid(),
            owner_pid=plan.owner.pid if plan.owner else None,
            state="draining" if self._lender.draining else "serving",
            extent_bytes=plan.extent_bytes,
            extents={str(state): n for state, n in table.counts().items()},
            bytes_untaken=max(0, plan.size_bytes - taken_bytes),
            receivers=self._lender.receivers(asyncio.get_running_loop().time()),
        )


def _allow_open_files(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
