"""Donors of a receiver's own that are started again whenever they end by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.receiver.owned import OwnedDonor
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)


class KeptDonor:
    """One donor, of which one process runs at a time. Used on the event loop's thread.

    What its processes lend is not joined here, and what one leaves when it dies stays its
    receiver's to vacate.
    """

    def __init__(self, start: Callable[[], OwnedDonor], settings: Settings) -> None:
        """Start it; `start` does so each time, under the same name."""
        self._start = start
        self._settings = settings
        self._process = start()
        self._keeping: asyncio.Task[None] | None = None
        self._let_go = False

    async def ready(self, deadline_s: float) -> None:
        """Return once it can be joined, as `OwnedDonor.ready` does."""
        await self._process.ready(deadline_s)

    def keep(self) -> None:
        """It is ready. From now on start it again when it ends, until `let_go`."""
        if not self._let_go:
            self._keeping = asyncio.create_task(self._keep())

    async def let_go(self) -> None:
        """Start it no more."""
        self._let_go = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    async def end(self) -> None:
        """End its process, also one that was being started. It must have been let go."""
        await self._process.end()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        first_s, most_s = self._settings.owned_restart_s, self._settings.owned_restart_max_s
        wait_s = first_s
        while True:
            ready_s = loop.time()
            await self._process.over()
            await self._process.end()  # closes what was kept open for it
            if loop.time() - ready_s >= most_s:
                wait_s = first_s
            is_ready = False
            while not is_ready:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, most_s)
                is_ready = await self._start_again(wait_s)

    async def _start_again(self, next_wait_s: float) -> bool:
        deadline_s = asyncio.get_running_loop().time() + self._settings.join_timeout_s
        try:
            self._process = self._start()
            await self._process.ready(deadline_s)
        except SwiftCacheError as error:
            logger.warning("%s; tried again in %g s", error, next_wait_s)
            await self._process.end()
            return False
        logger.info("%s was started again", self._process.what)
        return True
