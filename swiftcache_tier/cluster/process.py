"""One process of a cluster: started, its lines forwarded, asked whether it serves, ended."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import time
import urllib.request
from collections import deque
from collections.abc import Callable

from swiftcache_tier.cluster.commands import Member, environment
from swiftcache_tier.control.query import query_status
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.process_tree import alive, kill, members
from swiftcache_tier.settings import Settings

Forward = Callable[[str, str], None]
"""Takes a member's name and a line of its output, without the line's end."""

# Whatever http_proxy says: these servers are on this machine.
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_READ_BYTES = 64 << 10
_LINE_BYTES_MAX = 64 << 10
_KEPT_LINES = 200
_KILL_WAIT_S = 10.0
_POLL_INTERVAL_S = 0.05


class MemberProcess:
    """A running member, in a Unix session of its own: Ctrl-C reaches it only through `end`.

    All methods are for the event loop that `start` was called in.
    """

    def __init__(self, member: Member, forward: Forward) -> None:
        self.member = member
        self.ready = False
        self._forward = forward
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None

    async def start(self) -> None:
        """Raises SwiftCacheError when the command cannot be run."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.member.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment(self.member),
                start_new_session=True,
            )
        except OSError as error:
            raise SwiftCacheError(
                f"{self.member.name} cannot be started ({error.strerror}): {self.member.line}"
            ) from error
        self._ended = asyncio.create_task(self._run(self._process))

    @property
    def pid(self) -> int:
        assert self._process is not None, "the member has not been started"
        return self._process.pid

    @property
    def ended(self) -> asyncio.Task[int]:
        """Done when the process has ended; its exit code."""
        assert self._ended is not None, "the member has not been started"
        return self._ended

    def last_words(self) -> str:
        """What the process said of its end: the last line with an exception or error, or any."""
        lines = [line.strip() for line in self._last_lines if line.strip()]
        telling = [line for line in lines if "Error" in line or line.startswith("swiftcache")]
        return (telling or lines or ["nothing"])[-1]

    async def is_serving(self, settings: Settings) -> bool:
        """Whether it answers: a server on /health with 200, a donor with its status."""
        if not self.ready:
            self.ready = await asyncio.to_thread(_answers, self.member, self.pid, settings)
        return self.ready

    async def end(self, grace_s: float, at_once: asyncio.Event) -> list[int]:
        """SIGTERM; SIGKILL to all that is left after `grace_s`, or once `at_once` is set.

        Returns the process ids of what outlived even that.
        """
        tree = members(self.pid)
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                self._signal(signal.SIGTERM)
            impatience = asyncio.create_task(at_once.wait())
            await asyncio.wait(
                {self.ended, impatience}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED
            )
            impatience.cancel()
        left = list({process.pid: process for process in [*tree, *members(self.pid)]}.values())
        kill(left)
        end = time.monotonic() + _KILL_WAIT_S
        while (left := alive(left)) and time.monotonic() < end:
            await asyncio.sleep(_POLL_INTERVAL_S)
        await asyncio.wait({self.ended}, timeout=_KILL_WAIT_S)
        return [process.pid for process in left]

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def _run(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        forwarding = asyncio.create_task(self._forward_lines(process.stdout))
        code = await process.wait()
        # What left the session may hold the pipe open; what was written before the end is there.
        await asyncio.wait({forwarding}, timeout=1.0)
        forwarding.cancel()
        return code

    async def _forward_lines(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(_READ_BYTES):
            # Progress bars end their lines with a carriage return alone.
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
        self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._last_lines.append(text)
            self._forward(self.member.name, text)


def _answers(member: Member, pid: int, settings: Settings) -> bool:
    if not isinstance(member.ready, str):
        try:
            reply = query_status(member.ready, settings)
        except SwiftCacheError:
            return False
        # A donor that somebody else started may have the name.
        return reply.state == "serving" and reply.pid in {own.pid for own in members(pid)}
    try:
        health = f"{member.ready}/health"
        with _WITHOUT_PROXY.open(health, timeout=settings.status_timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False
