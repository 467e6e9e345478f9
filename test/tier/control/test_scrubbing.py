"""When a donor wipes its memory."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.donor import standalone
from swiftcache_tier.donor.plan import plan_donor
from swiftcache_tier.donor.standalone import _StandaloneServer
from swiftcache_tier.extents.host import HostArena, HostExtent
from swiftcache_tier.settings import Settings


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

    @property
    def extents(self) -> list[HostExtent]:
        return self._server._store._extents  # type: ignore[return-value]

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._server._ending.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        with ExitStack() as parts:
            self._loop = asyncio.get_running_loop()
            self._server = _StandaloneServer(self._plan, self._settings, parts)
            await self._server.run(self._ready.set)


def test_extents_that_cannot_be_scrubbed_keep_no_others_waiting_and_are_told_of_once(
    runtime_dir: Path,
    settings: Settings,
    start_receiver: Any,
    wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: Counter[HostExtent] = Counter()
    scrub = HostExtent.scrub
    full = True

    def out_of_memory(extent: HostExtent) -> None:
        tries[extent] += 1
        if full and extent in donor.extents[:-1]:
            raise OSError(errno.ENOMEM, "no context")
        scrub(extent)

    monkeypatch.setattr(HostExtent, "scrub", out_of_memory)
    monkeypatch.setattr(HostArena, "scrub_bytes", 526 << 20)
    caplog.set_level(logging.INFO, standalone.__name__)
    donor = DonorThread(runtime_dir, settings)
    try:
        start_receiver("first", donor.spec).process.kill()
        hasty = replace(settings, join_timeout_s=0.1)  # more than one extent does not come
        second = start_receiver("second", donor.spec, settings=hasty)
        wait_for(lambda: second("status")["bytes"] == 1 << 20, "the last extent is lent again")
        wait_for(lambda: tries[donor.extents[0]] > 3, "the others are tried again and again")
        full = False
        wait_for(lambda: second("status")["bytes"] == 4 << 20, "there is room, and all are lent")
    finally:
        donor.end()
    failed, cleaned = (r.message for r in caplog.records if "scrubbed" in r.message)
    assert failed.endswith(
        "extents cannot be scrubbed and wait, not lent: no context; free 526 MiB on host; they "
        "are tried again every 0.05 s"
    )
    assert cleaned == "all extents could be scrubbed, and are lent again"


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
