"""The donor daemon: memory of its own, lent until a signal or its owner's end."""

from __future__ import annotations

import asyncio
import errno
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
from swiftcache_tier.sizes import count_extents, format_size

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
        self._scrub_problem: str | None = None
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
        last = -1
        while True:
            await self._dirty.wait()
            if self._lender.draining:
                return  # nobody else gets it from here; the system zeroes what it gets back
            self._dirty.clear()
            while dirty := self._next_dirty(last):
                clean, error = await self._store.scrub(dirty)
                last = dirty[-1]
                self._lender.scrubbed(clean, loop.time())
                self._note_scrub(error)
                if not clean:
                    await asyncio.sleep(self._settings.heartbeat_s)

    def _next_dirty(self, last: int) -> list[int]:
        """In turn, those after `last` first: some may fail for long, and others wait for them."""
        dirty = sorted(self._lender.table.dirty, key=lambda slot: (slot <= last, slot))
        return dirty[: self._settings.extents_per_message]

    def _note_scrub(self, error: OSError | None) -> None:
        """Log when scrubbing begins to fail, fails otherwise than before, or all is clean again."""
        waiting = len(self._lender.table.dirty)
        problem = None if error is None else str(error.strerror)
        if problem == self._scrub_problem or (problem is None and waiting):
            return
        self._scrub_problem = problem
        if error is None:
            logger.info("all extents could be scrubbed, and are lent again")
            return
        arena = self._plan.arena
        advice = ""
        if error.errno == errno.ENOMEM and arena.scrub_bytes:
            advice = f"free {format_size(arena.scrub_bytes)} on {arena.device}; "
        logger.error(
            "%s cannot be scrubbed and wait, not lent: %s; %sthey are tried again every %g s",
            count_extents(waiting),
            problem,
            advice,
            self._settings.heartbeat_s,
        )

    def _dirtied(self) -> None:
        self._dirty.set()
        super()._dirtied()

    def _bytes_untaken(self) -> int:
        clean = set(range(self._plan.extents)) - self._lender.table.dirty
        return max(0, self._plan.size_bytes - self._store.taken_bytes(clean))
