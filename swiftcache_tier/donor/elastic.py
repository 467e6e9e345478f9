"""The donor inside a serving engine: a thread that lends what the engine's scheduler can spare."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import uvloop
from msgspec.structs import replace

from swiftcache_tier.control.credentials import Peer
from swiftcache_tier.control.messages import (
    AtDoor,
    ErrorCode,
    Hello,
    MessageError,
    StatusReply,
    StatusRequest,
)
from swiftcache_tier.control.records import RecordChannel
from swiftcache_tier.donor.plan import DonorPlan
from swiftcache_tier.donor.server import DonorServer
from swiftcache_tier.donor.store import Shared
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)


class ElasticDonor:
    """Extents go out by `lend` and come back by `take_returned`; nothing else is shared.

    An extent belongs to the scheduler or to this donor, never to both. All methods are for one
    thread, the scheduler's; none but `start` and `stop` blocks.
    """

    def __init__(self, plan: DonorPlan, memory: Shared, settings: Settings) -> None:
        """Does not start the thread. `memory` is only shared from, as long as the thread runs."""
        self.demand = 0
        """Extents that receivers would take beyond what they have been lent, as of a moment ago."""
        self._ours: set[int] = set()
        self._stuck: frozenset[int] | None = None
        """Once lending has failed: what receivers had then."""
        self._plan = plan
        self._memory = memory
        self._settings = settings
        self._returned: deque[int] = deque()
        self._running: Future[tuple[asyncio.AbstractEventLoop, _ElasticServer]] = Future()
        self._thread = threading.Thread(target=self._run, name="swiftcache-donor", daemon=True)

    @property
    def handed_over(self) -> int:
        """Extents that are this donor's now."""
        return len(self._ours)

    def start(self) -> None:
        """Returns once receivers can join. Raises SwiftCacheError when the name is taken.

        Lowers the process's thread switch interval to `thread_switch_s`.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), self._settings.thread_switch_s))
        self._thread.start()
        self._loop, self._server = self._running.result()

    def lend(self, slots: Sequence[int], target: int) -> None:
        """Hand extents over that read as zeros, and that nothing here uses; see `aim`."""
        self._ours.update(slots)
        self.demand = max(0, self.demand - len(slots))
        self._call(self._server.lend, list(slots), target)

    def aim(self, target: int) -> None:
        """Have this many extents lent: what is over is asked back, and comes back in time."""
        self._call(self._server.aim, target)

    def take_returned(self) -> list[int]:
        """Extents that are the scheduler's again. What is in them is anybody's."""
        stuck = self._stuck  # read first: nothing is returned by the thread once it is there
        slots = [self._returned.popleft() for _ in range(len(self._returned))]
        self._ours.difference_update(slots)
        if stuck is not None:
            self.demand = 0
            slots += self._ours - stuck
            self._ours &= stuck
        return slots

    def status(self) -> StatusReply | None:
        """As of the last heartbeat; None before the first.

        Its state is "failed" when lending has failed. What receivers had then is "degraded": it
        cannot come back.
        """
        return self._server.last_status

    def stop(self) -> bool:
        """Ask everything back, wait for it as long as receivers have, end. Returns whether it did.

        Whatever is not back by then stays with its receivers until they unmap it.
        """
        if not self._thread.is_alive():
            return True
        self._call(self._server.end)
        self._thread.join(2 * self._settings.reclaim_deadline_s)
        return not self._thread.is_alive()

    def _note_demand(self, extents: int) -> None:
        self.demand = extents

    def _call(self, function: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as parts:
                runner.run(self._serve(parts))
        except Exception as error:
            if self._running.done():
                logger.exception("the donor's thread has ended: `swiftcache status` misses it")
                return
            self._running.set_exception(error)

    async def _serve(self, parts: ExitStack) -> None:
        server = _ElasticServer(
            self._plan, self._memory, self._settings, parts, self._returned, self._note_demand
        )
        loop = asyncio.get_running_loop()
        try:
            await server.run(lambda: self._running.set_result((loop, server)))
        except Exception:
            logger.exception(
                "lending has failed: what receivers have stays with them, and nothing is lent "
                "until this server is started again"
            )
            self._stuck = server.fail()
            await server.say_that_it_failed()


class _ElasticServer(DonorServer):
    """On the donor's thread. What receivers release goes back to the scheduler at once."""

    def __init__(
        self,
        plan: DonorPlan,
        memory: Shared,
        settings: Settings,
        parts: ExitStack,
        returned: deque[int],
        note_demand: Callable[[int], None],
    ) -> None:
        self.last_status: StatusReply | None = None
        self._returned = returned
        self._note_demand = note_demand
        self._failed = False
        super().__init__(plan, settings, parts, make_memory=lambda _: memory, engine=self)

    def take_returned(self, slots: list[int]) -> None:
        self._returned.extend(slots)

    def lend(self, slots: list[int], target: int) -> None:
        if not self._failed:
            self._lender.lend(slots, target, asyncio.get_running_loop().time())

    def aim(self, target: int) -> None:
        if not self._failed:
            self._lender.aim(target, asyncio.get_running_loop().time())

    def end(self) -> None:
        self._ending.set()

    def fail(self) -> frozenset[int]:
        """Decide nothing any more. Returns what receivers have and nobody asks back."""
        self._failed = True
        self.last_status = self._status()
        table = self._lender.table
        slots = range(self._plan.extents)
        return frozenset(s for s in slots if table.state(s) is not LeaseState.FREE)

    async def say_that_it_failed(self) -> None:
        """Answer at the door, so that people see it, until `end`."""
        async with asyncio.TaskGroup() as group:
            reception = group.create_task(self._reception.run())
            await self._ending.wait()
            reception.cancel()

    def _welcome(self, hello: Hello, peer: Peer, channel: RecordChannel) -> None:
        self._check_not_failed()
        super()._welcome(hello, peer, channel)

    def _answer(self, message: AtDoor, peer: Peer) -> StatusReply:
        if not isinstance(message, StatusRequest):
            self._check_not_failed()
        return super()._answer(message, peer)

    def _check_not_failed(self) -> None:
        if self._failed:
            raise MessageError(
                ErrorCode.DRAINING,
                "this donor's lending has failed, as the log of its server says: start the server "
                "again, or choose another donor",
            )

    def _status(self) -> StatusReply:
        status = super()._status()
        if not self._failed:
            return status
        free = status.extents[LeaseState.FREE]
        extents = dict.fromkeys(status.extents, 0)
        extents |= {LeaseState.FREE: free, LeaseState.DEGRADED: self._plan.extents - free}
        return replace(status, state="failed", extents=extents, kept=free)

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._services(), self._report()]

    async def _report(self) -> None:
        """Tell the scheduler how much is wanted. Reading it from there would need a lock."""
        while True:
            self._note_demand(self._lender.demand)
            self.last_status = self._status()
            await asyncio.sleep(self._settings.demand_interval_s)
