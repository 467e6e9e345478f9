"""A contender's server: started with its donors, proven to be the one that answers, ended."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.server.api import is_healthy, server_info
from swiftcache_bench.server.contenders import Contender
from swiftcache_bench.server.donors import SWIFTCACHE, Donors
from swiftcache_bench.server.identity import FlagCheck, check_flags, foreign_listeners
from swiftcache_bench.server.processes import (
    POLL_INTERVAL_S,
    ProcessTree,
    port_is_free,
    wait_for_free_port,
)

LAUNCH = (sys.executable, "-m", "sglang.launch_server")


@dataclass(frozen=True)
class LaunchSettings:
    """How servers are started. ``common_flags`` are those of every contender."""

    model_path: str
    port: int
    log_dir: Path
    common_flags: tuple[str, ...] = ()
    launch: tuple[str, ...] = LAUNCH
    swiftcache: tuple[str, ...] = SWIFTCACHE
    start_timeout_s: float = 900.0
    donor_timeout_s: float = 60.0
    stop_grace_s: float = 15.0
    port_free_timeout_s: float = 60.0
    health_timeout_s: float = 5.0


class ContenderServer:
    """Context manager: leaving it ends all that `start` has started, by process id, and waits until
    the port is free again. It raises BenchmarkError when that cannot be done.
    """

    def __init__(self, contender: Contender, settings: LaunchSettings) -> None:
        self.contender = contender
        self.url = f"http://127.0.0.1:{settings.port}"
        self.log_path = settings.log_dir / "server.log"
        self.flag_check: FlagCheck | None = None
        self._settings = settings
        # Shown in /server_info, and no two servers have the same.
        self._mark = f"bench-{uuid.uuid4().hex}"
        self._donors: Donors | None = None
        self._server: ProcessTree | None = None
        # Unix sockets lie in it, and their paths have to be short.
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="swiftcache-bench-"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    @property
    def command(self) -> list[str]:
        """The whole command line of the server."""
        settings = self._settings
        command = [*settings.launch, "--model-path", settings.model_path]
        command += ["--host", "127.0.0.1", "--port", str(settings.port)]
        command += [*settings.common_flags, *self._own_flags()]
        return [*command, "--weight-version", self._mark]

    def start(self) -> None:
        """Return once the contender's server answers at ``url``, with its donors in use.

        Raises BenchmarkError when the port is taken, a process ends, the server is not ready in
        time, another server answers, or it runs other settings than the contender's.
        """
        settings = self._settings
        if not port_is_free(settings.port):
            raise BenchmarkError(
                f"port {settings.port} is taken: end what listens there, or give another --port"
            )
        if self.contender.uses_donors:
            self._donors = Donors(
                self.contender.donors,
                self._runtime_dir,
                settings.log_dir,
                swiftcache=settings.swiftcache,
            )
            self._donors.start(settings.donor_timeout_s)
        self._server = ProcessTree(self.command, self.log_path, self.contender.env)
        self._wait_until_healthy(self._server)
        self.check()

    def check(self) -> dict[str, Any]:
        """``/server_info``, after making sure that it is this server's and as it was asked for.

        Raises BenchmarkError.
        """
        server = self._running_server()
        if server.exit_code is not None:
            raise server.failure(f"the server ended with exit code {server.exit_code}")
        if self._donors is not None:
            self._donors.check()
        info = server_info(self.url)
        port = self._settings.port
        if info.get("weight_version") != self._mark or foreign_listeners(server, port):
            raise server.failure(
                f"another server answers on port {port}, not the one started for "
                f"{self.contender.name!r}"
            )
        self._verify_flags(info)
        if self._donors is not None:
            self._verify_donors(self._donors.names, info)
        return info

    def _stop(self) -> None:
        settings = self._settings
        with contextlib.ExitStack() as steps:
            # Run from the last to the first, each also when one before it has failed.
            steps.callback(shutil.rmtree, self._runtime_dir, ignore_errors=True)
            if self._donors is not None:
                steps.callback(self._donors.stop, settings.stop_grace_s)
            if self._server is not None:
                steps.callback(wait_for_free_port, settings.port, settings.port_free_timeout_s)
                steps.callback(self._server.end, settings.stop_grace_s)

    def _wait_until_healthy(self, server: ProcessTree) -> None:
        settings = self._settings
        end = time.monotonic() + settings.start_timeout_s
        while not is_healthy(self.url, settings.health_timeout_s):
            if server.exit_code is not None:
                raise server.failure(f"the server ended with exit code {server.exit_code}")
            if time.monotonic() > end:
                raise server.failure(
                    f"the server is not ready after {settings.start_timeout_s:g} s"
                )
            time.sleep(POLL_INTERVAL_S)

    def _verify_flags(self, info: dict[str, Any]) -> None:
        own = self._own_flags()
        self.flag_check = check_flags([*self._settings.common_flags, *own], info)
        own_names = {word.partition("=")[0] for word in own}
        for flag, asked, runs in self.flag_check.differing:
            if flag in own_names:
                raise BenchmarkError(
                    f"contender {self.contender.name!r} asked for {flag} {asked}, but the server "
                    f"runs {runs}: SGLang changed it, see {self.log_path}"
                )

    def _verify_donors(self, names: Sequence[str], info: dict[str, Any]) -> None:
        states = info.get("internal_states") or [{}]
        tier = states[0].get("swiftcache") or {}
        missing = set(names) - {donor.get("name") for donor in tier.get("donors", [])}
        if missing:
            raise BenchmarkError(
                f"the server of {self.contender.name!r} does not use donors "
                f"{', '.join(sorted(missing))} that were started for it: see the logs in "
                f"{self._settings.log_dir}"
            )

    def _own_flags(self) -> list[str]:
        return self.contender.flags(self._runtime_dir)

    def _running_server(self) -> ProcessTree:
        assert self._server is not None, "the server is used as a context manager"
        return self._server
