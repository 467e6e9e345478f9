"""The donor daemon: memory of its own, lent until a signal or its owner's end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

from swiftcache_tier.control.records import process_end
from swiftcache_tier.donor.owner import Owner
from swiftcache_tier.donor.plan import DonorPlan
from swiftcache_tier.donor.server import DonorServer
from swiftcache_tier.donor.store import ExtentStore
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)

_INTERRUPTED = 128 + signal.SIGINT


async def serve(plan: DonorPlan, settings: Settings, ready: Callable[[], None]) -> int:
    """Lend until a signal (TERM, INT, HUP) or the owner's end; then take everything back.

    Calls `ready` once receivers can join. Returns the exit status for the process. Raises
    SwiftCacheError when the donor cannot start. Its sockets are removed in any case.
    """
    with ExitStack() as parts:
        server = _StandaloneServer(plan, settings, parts)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, server.on_signal, number)
        await server.run(ready)
        return server.exit_status


class _StandaloneServer(DonorServer):
    """Scrubs what comes back, on a thread of the store's."""

    def __init__(self, plan: DonorPlan, settings: Settings, parts: ExitStack) -> None:
        self.exit_status = 0
        self._dirty = asyncio.Event()
        super().__init__(plan, settings, parts, make_memory=self._make_store)

    def on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._ending.is_set():
            self.exit_status = _INTERRUPTED
            self._drained.set()
        self._ending.set()

    def _make_store(self, parts: ExitStack) -> ExtentStore:
        self._store = ExtentStore(self._plan.arena, self._plan.extent_bytes, self._plan.extents)
        parts.callback(self._store.close)
        return self._store

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        services = [*super()._services(), self._scrub()]
        if self._plan.owner is not None:
            services.append(self._end_with_owner(self._plan.owner))
        return services

    async def _end_with_owner(self, owner: Owner) -> None:
        await process_end(owner.pidfd)
        logger.info("the owner, process %d, has ended", owner.pid)
        self._ending.set()

    async def _scrub(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._dirty.wait()
            if self._lender.draining:
                return  # nobody else gets it from here; the system zeroes what it gets back
            self._dirty.clear()
            while dirty := sorted(self._lender.table.dirty)[: self._settings.extents_per_message]:
                clean = await self._store.scrub(dirty)
                self._lender.scrubbed(clean, loop.time())
                if len(clean) < len(dirty):
                    await asyncio.sleep(self._settings.heartbeat_s)

    def _dirtied(self) -> None:
        self._dirty.set()
        super()._dirtied()

    def _bytes_untaken(self) -> int:
        clean = set(range(self._plan.extents)) - self._lender.table.dirty
        return max(0, self._plan.size_bytes - self._store.taken_bytes(clean))
