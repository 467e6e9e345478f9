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

from swiftcache_tier.control.messages import StatusReply
from swiftcache_tier.donor.plan import DonorPlan
from swiftcache_tier.donor.server import DonorServer
from swiftcache_tier.donor.store import Shared
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
        self.handed_over = 0
        """Extents that are this donor's now."""
        self._plan = plan
        self._memory = memory
        self._settings = settings
        self._returned: deque[int] = deque()
        self._running: Future[tuple[asyncio.AbstractEventLoop, _ElasticServer]] = Future()
        self._thread = threading.Thread(target=self._run, name="swiftcache-donor", daemon=True)

    def start(self) -> None:
        """Returns once receivers can join. Raises SwiftCacheError when the name is taken.

        Lowers the process's thread switch interval to `thread_switch_s`.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), self._settings.thread_switch_s))
        self._thread.start()
        self._loop, self._server = self._running.result()

    def lend(self, slots: Sequence[int], target: int) -> None:
        """Hand extents over that read as zeros, and that nothing here uses; see `aim`."""
        self.handed_over += len(slots)
        self.demand = max(0, self.demand - len(slots))
        self._call(self._server.lend, list(slots), target)

    def aim(self, target: int) -> None:
        """Have this many extents lent: what is over is asked back, and comes back in time."""
        self._call(self._server.aim, target)

    def take_returned(self) -> list[int]:
        """Extents that are the scheduler's again. What is in them is anybody's."""
        slots = [self._returned.popleft() for _ in range(len(self._returned))]
        self.handed_over -= len(slots)
        return slots

    def status(self) -> StatusReply | None:
        """As of the last heartbeat; None before the first."""
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
                logger.exception("lending has failed: what is lent stays lent")
                return
            self._running.set_exception(error)

    async def _serve(self, parts: ExitStack) -> None:
        server = _ElasticServer(
            self._plan, self._memory, self._settings, parts, self._returned, self._note_demand
        )
        loop = asyncio.get_running_loop()
        await server.run(lambda: self._running.set_result((loop, server)))


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
        super().__init__(plan, settings, parts, make_memory=lambda _: memory, engine=self)

    def take_returned(self, slots: list[int]) -> None:
        self._returned.extend(slots)

    def lend(self, slots: list[int], target: int) -> None:
        self._lender.lend(slots, target, asyncio.get_running_loop().time())

    def aim(self, target: int) -> None:
        self._lender.aim(target, asyncio.get_running_loop().time())

    def end(self) -> None:
        self._ending.set()

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        return [*super()._services(), self._report()]

    async def _report(self) -> None:
        """Tell the scheduler how much is wanted. Reading it from there would need a lock."""
        while True:
            self._note_demand(self._lender.demand)
            self.last_status = self._status()
            await asyncio.sleep(self._settings.demand_interval_s)
