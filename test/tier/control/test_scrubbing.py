"""When a donor wipes its memory."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.donor.plan import plan_donor
from swiftcache_tier.donor.standalone import _StandaloneServer
from swiftcache_tier.extents.host import HostExtent


class DonorThread:
    """A standalone donor in this process, so that its scrubs can be seen."""

    def __init__(self, runtime_dir: Path, settings: Any) -> None:
        self._plan = plan_donor(
            device="host",
            size_bytes=4 << 20,
            name="a",
            runtime_dir=runtime_dir,
            extent_bytes=1 << 20,
            allow_users=(),
            owner=None,
            settings=settings,
        )
        self._settings = settings
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(60)

    @property
    def spec(self) -> str:
        return self._plan.paths.spec

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._server._ending.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        with ExitStack() as parts:
            self._loop = asyncio.get_running_loop()
            self._server = _StandaloneServer(self._plan, self._settings, parts)
            await self._server.run(self._ready.set)


def test_what_comes_back_is_scrubbed_unless_the_donor_ends(
    runtime_dir: Path,
    settings: Any,
    start_receiver: Any,
    wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scrubs: list[HostExtent] = []
    scrub = HostExtent.scrub

    def counted(extent: HostExtent) -> None:
        scrubs.append(extent)
        scrub(extent)

    monkeypatch.setattr(HostExtent, "scrub", counted)
    donor = DonorThread(runtime_dir, settings)
    first = start_receiver("first", donor.spec)
    first("fill", 0x77)
    first.process.kill()
    wait_for(lambda: len(scrubs) == 4, "the next owner will find zeros")
    second = start_receiver("second", donor.spec)
    second("fill", 0x78)
    donor.end()
    assert len(scrubs) == 4, "nobody gets it from a donor that has ended"
