"""Donor processes of a contender: ``swiftcache donor``, started, waited for, ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from swiftcache_bench.server.processes import POLL_INTERVAL_S, ProcessTree
from swiftcache_tier.spec import DonorSpec

SWIFTCACHE = (sys.executable, "-m", "swiftcache_tier")
STATUS_TIMEOUT_S = 30.0


class Donors:
    """Donors of ``specs`` in ``runtime_dir``, their logs in ``log_dir``; one thread.

    `start` returns once ``swiftcache status`` shows them all and raises BenchmarkError when one
    ended or they are not there after ``deadline_s``. `stop` ends what was started.
    """

    def __init__(
        self,
        specs: Sequence[DonorSpec],
        runtime_dir: Path,
        log_dir: Path,
        *,
        swiftcache: Sequence[str] = SWIFTCACHE,
    ) -> None:
        self.names = [f"bench-{number}" for number in range(len(specs))]
        self._specs = list(specs)
        self._runtime_dir = runtime_dir
        self._log_dir = log_dir
        self._swiftcache = list(swiftcache)
        self._running: list[ProcessTree] = []

    def start(self, deadline_s: float) -> None:
        for name, spec in zip(self.names, self._specs, strict=True):
            command = [*self._swiftcache, "donor", "--device", str(spec.device), "--size"]
            command += [str(spec.size_bytes), "--name", name]
            command += ["--runtime-dir", str(self._runtime_dir)]
            self._running.append(ProcessTree(command, self._log_dir / f"donor-{name}.log"))
        end = time.monotonic() + deadline_s
        while not self._serving() >= set(self.names):
            self.check()
            if time.monotonic() > end:
                raise self._running[0].failure(
                    f"`swiftcache status` does not show all donors after {deadline_s:g} s"
                )
            time.sleep(POLL_INTERVAL_S)

    def check(self) -> None:
        """Raises BenchmarkError when a donor has ended by itself."""
        for name, process in zip(self.names, self._running, strict=True):
            if process.exit_code is not None:
                raise process.failure(f"donor {name} ended with exit code {process.exit_code}")

    def stop(self, grace_s: float) -> None:
        while self._running:
            self._running.pop().end(grace_s)

    def _serving(self) -> set[str]:
        command = [*self._swiftcache, "status", "--json", "--runtime-dir", str(self._runtime_dir)]
        answer = subprocess.run(command, capture_output=True, timeout=STATUS_TIMEOUT_S, check=False)
        try:
            status: dict[str, Any] = orjson.loads(answer.stdout)
        except orjson.JSONDecodeError:
            return set()
        return {donor["name"] for donor in status["donors"] if donor["state"] == "serving"}
