"""Starts the members of a cluster, stays with them, and ends them all together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from swiftcache_tier.cluster.commands import Member
from swiftcache_tier.cluster.config import ClusterFile
from swiftcache_tier.cluster.output import Output
from swiftcache_tier.cluster.process import Forward, MemberProcess
from swiftcache_tier.settings import Settings

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_INTERVAL_S = 0.25

Say = Callable[[str], None]


async def supervise(waves: Sequence[Sequence[Member]], cluster: ClusterFile) -> bool:
    """Run `waves`, the members of `cluster`, with their lines on the terminal: see `Supervisor`."""
    names = [member.name for wave in waves for member in wave]
    supervisor: Supervisor
    output = Output(names, lambda: supervisor.stop())
    supervisor = Supervisor(
        waves, cluster.start_timeout_s, cluster.stop_timeout_s, output.forward, output.say
    )
    return await supervisor.run()


class Supervisor:
    """Runs groups of members: each is started when all before it serve, ended in reverse.

    The first SIGINT, SIGTERM or SIGHUP ends everything, whatever the phase; a second one does not
    wait. `stop` has the same effect as a signal. One event loop, in the main thread.
    """

    def __init__(
        self,
        waves: Sequence[Sequence[Member]],
        start_timeout_s: float,
        stop_timeout_s: float,
        forward: Forward,
        say: Say,
    ) -> None:
        self._waves = waves
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._forward = forward
        self._say = say
        self._settings = Settings.from_env()
        self._running: list[list[MemberProcess]] = []
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()

    async def run(self) -> bool:
        """Until a signal, or until a member fails. Returns whether all went as it was told to."""
        with self._signals():
            try:
                problem = await self._start() or await self._stay()
                if problem is not None:
                    self._say(problem)
                return problem is None
            finally:
                await self._end()

    def stop(self) -> None:
        """End everything; told twice, at once."""
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    async def _start(self) -> str | None:
        """What went wrong, if anything; also returns when it is told to stop."""
        for wave in self._waves:
            processes = [MemberProcess(member, self._forward) for member in wave]
            self._running.append([])
            for process in processes:
                if self._stop.is_set():
                    return None
                self._say(f"starting {process.member.name}: {process.member.line}")
                await process.start()
                self._running[-1].append(process)
            problem = await self._wait_until_serving(processes)
            if problem is not None or self._stop.is_set():
                return problem
        servers = [m for wave in self._waves for m in wave if isinstance(m.ready, str)]
        places = ", ".join(f"{member.name} at {member.ready}" for member in servers)
        self._say(f"ready: {places or 'all donors'}")
        return None

    async def _wait_until_serving(self, processes: Sequence[MemberProcess]) -> str | None:
        end = time.monotonic() + self._start_timeout_s
        while not self._stop.is_set():
            if (problem := self._ended_member()) is not None:
                return problem
            serving = await asyncio.gather(*(p.is_serving(self._settings) for p in processes))
            if all(serving):
                return None
            if time.monotonic() > end:
                late = ", ".join(p.member.name for p in processes if not p.ready)
                return (
                    f"{late} not ready after {self._start_timeout_s:g} s: see the lines "
                    f"above, or give more time with start_timeout_s"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _POLL_INTERVAL_S)
        return None

    async def _stay(self) -> str | None:
        """Until told to stop, or a member ends by itself."""
        told = asyncio.create_task(self._stop.wait())
        ends = {process.ended for wave in self._running for process in wave}
        await asyncio.wait({told, *ends}, return_when=asyncio.FIRST_COMPLETED)
        stopped = self._stop.is_set()
        told.cancel()
        return None if stopped else self._ended_member()

    def _ended_member(self) -> str | None:
        for process in (process for wave in self._running for process in wave):
            if process.ended.done():
                return (
                    f"{process.member.name} ended with exit code {process.ended.result()}; it "
                    f"said: {process.last_words()}"
                )
        return None

    async def _end(self) -> None:
        names = [process.member.name for wave in self._running for process in wave]
        if names:
            self._say(f"ending {', '.join(names)}")
        for wave in reversed(self._running):
            ends = (process.end(self._stop_timeout_s, self._at_once) for process in wave)
            if survivors := list(chain(*await asyncio.gather(*ends))):
                self._say(f"processes {survivors} outlived SIGKILL: the system has to end them")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)
