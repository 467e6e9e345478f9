"""Processes that a comparison starts: who belongs to them, which ports they hold, how they end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from swiftcache_bench.errors import BenchmarkError
from swiftcache_tier.process_tree import kill, members

POLL_INTERVAL_S = 0.1
KILL_WAIT_S = 10.0
SAID_CHARS_MAX = 300

_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def port_is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` now (connections that are closing do not count)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def wait_for_free_port(port: int, deadline_s: float) -> None:
    """Raises BenchmarkError when ``port`` is not free within ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not port_is_free(port):
        if time.monotonic() > end:
            raise BenchmarkError(
                f"port {port} is still taken after {deadline_s:g} s: end what listens there, or "
                "give another --port"
            )
        time.sleep(POLL_INTERVAL_S)


class ProcessTree:
    """A command and all it starts, in a Unix session of their own, its output in a log file."""

    def __init__(
        self, command: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.command = tuple(command)
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._leader = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._leader.pid

    @property
    def exit_code(self) -> int | None:
        """Of the command itself; None while it runs."""
        return self._leader.poll()

    def members(self) -> list[psutil.Process]:
        """The live processes of the tree, the command's own among them."""
        return members(self.pid)

    def end(self, grace_s: float) -> None:
        """SIGTERM to the command; after ``grace_s`` SIGKILL to all that is left. Idempotent.

        Raises BenchmarkError when a process outlives even that.
        """
        tree = self.members()
        if self._leader.poll() is None:
            self._leader.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leader.wait(grace_s)
        left = {process.pid: process for process in [*tree, *self.members()]}
        kill(list(left.values()))
        if self._leader.poll() is None:
            self._leader.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leader.wait(KILL_WAIT_S)
        _, alive = psutil.wait_procs(list(left.values()), timeout=KILL_WAIT_S)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            raise BenchmarkError(
                f"processes {pids} outlived SIGKILL: nothing can be measured beside them"
            )

    def failure(self, what: str) -> BenchmarkError:
        """An error of one line: ``what``, what the log says of it, where the log is.

        That is the last exception's line in it, or else the last line.
        """
        text = self.log_path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        raised = [line for line in lines if _EXCEPTION.match(line)]
        said = (raised or lines or ["nothing"])[-1][:SAID_CHARS_MAX]
        return BenchmarkError(f"{what}; its log says: {said} ({self.log_path})")
