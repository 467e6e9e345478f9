"""The thread on which a receiver speaks with its donors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import uvloop

from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import JoinedAddressRange
from swiftcache_tier.receiver.events import Event
from swiftcache_tier.receiver.link import DonorLink
from swiftcache_tier.receiver.links import Links
from swiftcache_tier.receiver.reach import Reach
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import DonorSpec
from swiftcache_tier.topology import pin_thread_to_numa_node

logger = logging.getLogger(__name__)


class ControlThread:
    """Commands go in and return at once, events come out of `events`; nothing else is shared.

    All methods are for one other thread, the scheduler's.
    """

    def __init__(
        self,
        *,
        block_bytes: int,
        address_range: JoinedAddressRange,
        reach: Reach,
        settings: Settings,
        runtime_dir: Path,
        receiver_name: str,
        own_donor: DonorPaths | None,
    ) -> None:
        """Does not start the thread. `address_range` is the thread's until `stop`."""
        self.events: deque[Event] = deque()
        self._settings = settings
        self._numa_node = reach.numa_node
        self._make_links = lambda: Links(
            block_bytes=block_bytes,
            address_range=address_range,
            reach=reach,
            settings=settings,
            runtime_dir=runtime_dir,
            receiver_name=receiver_name,
            own_donor=own_donor,
            emit=self.events.append,
        )
        self._thread = threading.Thread(target=self._run, name="swiftcache-control", daemon=True)
        self._running: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Links]] = (
            concurrent.futures.Future()
        )
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Start the thread; returns when it takes commands.

        Lowers the process's thread switch interval to `thread_switch_s`.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), self._settings.thread_switch_s))
        self._thread.start()
        self._loop, self._links = self._running.result()

    def join(self, specs: Sequence[DonorSpec]) -> None:
        """Block until every SPEC has granted memory. Raises SwiftCacheError."""
        joined = asyncio.run_coroutine_threadsafe(self._links.join(specs), self._loop)
        # The coroutine keeps its own deadlines; this one is for a thread that is stuck.
        settings = self._settings
        patience_s = 2 * (settings.join_timeout_s + settings.handshake_timeout_s)
        try:
            while True:
                progress = self._links.progress
                concurrent.futures.wait([joined], patience_s)
                if joined.done():
                    return joined.result()
                if self._links.progress == progress:
                    raise SwiftCacheError(
                        f"joining the donors made no progress for {patience_s:g} s: see "
                        f"`swiftcache status` for one that is stuck"
                    )
        finally:
            joined.cancel()  # has no effect once it is done

    def link(self, key: int) -> DonorLink | None:
        """The link of a donor, for reading; None when it is over."""
        return self._links.link(key)

    def release(self, key: int, slots: list[int]) -> None:
        """Unmap slots that nothing uses any more, and tell the donor."""
        self._loop.call_soon_threadsafe(self._links.release, key, slots)

    def forget(self, key: int) -> None:
        """Nothing of that donor, which is lost, is in use any more."""
        self._loop.call_soon_threadsafe(self._links.forget, key)

    def stop(self) -> bool:
        """Unmap everything, leave all donors, end the thread. Returns whether it ended."""
        if not self._thread.is_alive():
            return True
        self._loop.call_soon_threadsafe(self._stop.set)
        settings = self._settings
        # Each part of leaving keeps its own deadlines, of which these are more than the sum.
        patience_s = 3 * (settings.leave_timeout_s + settings.owned_end_timeout_s)
        while True:
            progress = self._links.progress
            self._thread.join(patience_s)
            if not self._thread.is_alive() or self._links.progress == progress:
                return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            # With all threads that it starts, and before it maps anything.
            if pin_thread_to_numa_node(self._numa_node):
                logger.info("the control thread runs on NUMA node %d", self._numa_node)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception as error:
            if self._running.done():
                raise
            self._running.set_exception(error)

    async def _serve(self) -> None:
        links = self._make_links()
        watch = asyncio.create_task(links.watch())
        self._running.set_result((asyncio.get_running_loop(), links))
        await self._stop.wait()
        watch.cancel()
        await links.leave()
