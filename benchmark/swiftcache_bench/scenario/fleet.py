"""The processes of a variant: donors of plain memory, and servers started by `swiftcache up`."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson
from msgspec.structs import replace

from swiftcache_bench.dummy_models import write_dummy_model
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.scenario.file import DUMMY_PREFIX, ScenarioFile, Variant
from swiftcache_bench.server.api import flush_cache, server_info
from swiftcache_bench.server.donors import SWIFTCACHE
from swiftcache_bench.server.processes import POLL_INTERVAL_S, ProcessTree, free_port
from swiftcache_tier.cluster.config import ClusterFile, ServerEntry
from swiftcache_tier.process_tree import kill

STOP_TIMEOUT_S = 20.0
DONOR_TIMEOUT_S = 60.0


class Fleet:
    """Context manager: leaving it ends everything that was started.

    Donors of plain memory are not the launcher's: one of them may be killed while the rest goes on.
    """

    def __init__(self, variant: Variant, file: ScenarioFile, folder: Path) -> None:
        """Logs, the launcher's file and dummy models go to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._folder = folder
        self._variant = variant
        self._runtime_dir = Path(tempfile.mkdtemp(prefix="swiftcache-bench-"))
        self._mark = f"bench-{uuid.uuid4().hex}"
        self._donors: dict[str, ProcessTree] = {}
        self._up: ProcessTree | None = None
        self.servers = {name: self._prepared(server) for name, server in variant.servers.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as steps:
            # Run from the last to the first, each also when one before it has failed.
            steps.callback(shutil.rmtree, self._runtime_dir, ignore_errors=True)
            for donor in self._donors.values():
                steps.callback(donor.end, STOP_TIMEOUT_S)
            if self._up is not None:
                # The launcher waits for its servers, group by group.
                groups = len(self.servers)
                steps.callback(self._up.end, STOP_TIMEOUT_S * (groups + 1))

    def url(self, server: str) -> str:
        return f"http://127.0.0.1:{self.servers[server].port}"

    def model_path(self, server: str) -> str:
        return self.servers[server].model

    def start(self) -> None:
        """Return once all serve. Raises BenchmarkError when one does not, or another answers."""
        for name, donor in self._variant.donors.items():
            command = [*SWIFTCACHE, "donor", "--device", donor.device, "--size", donor.size]
            command += ["--name", name, "--runtime-dir", str(self._runtime_dir)]
            log = self._folder / f"donor-{name}.log"
            self._donors[name] = ProcessTree(command, log, self._file.env)
        for name, process in self._donors.items():
            self._wait_for(process, f"swiftcache donor {name}:", DONOR_TIMEOUT_S)
        cluster = ClusterFile(
            servers=self.servers,
            args=f"{self._file.args} --weight-version {self._mark}",
            env=self._file.env,
            start_timeout_s=self._file.start_timeout_s,
            stop_timeout_s=STOP_TIMEOUT_S,
        )
        path = self._folder / "cluster.json"
        path.write_bytes(orjson.dumps(msgspec.to_builtins(cluster)))
        command = [*SWIFTCACHE, "up", str(path), "--runtime-dir", str(self._runtime_dir)]
        self._up = ProcessTree(command, self._folder / "servers.log")
        # As many groups as servers at most, each with its own time.
        timeout_s = self._file.start_timeout_s * len(self.servers)
        self._wait_for(self._up, "swiftcache up: ready:", timeout_s)
        for name in self.servers:
            self.info(name)

    def info(self, server: str) -> dict[str, Any]:
        """`/server_info`, after making sure that this fleet's server answers."""
        self._check(self._running)
        info = server_info(self.url(server))
        if info.get("weight_version") != self._mark:
            raise BenchmarkError(f"another server than {server!r} answers at {self.url(server)}")
        return info

    def tier(self, server: str) -> dict[str, Any]:
        """What the server says of donors and blocks; empty without donors."""
        states = self.info(server).get("internal_states") or [{}]
        tier: dict[str, Any] = states[0].get("swiftcache") or {}
        return tier

    def flush(self) -> None:
        for name in self.servers:
            flush_cache(self.url(name))

    def kill_donor(self, name: str) -> None:
        """SIGKILL, as if the process had crashed."""
        kill(self._donors[name].members())

    @property
    def _running(self) -> ProcessTree:
        assert self._up is not None, "the fleet has not been started"
        return self._up

    def _prepared(self, server: ServerEntry) -> ServerEntry:
        """With a free port, and its dummy model written."""
        model = server.model
        if model.startswith(DUMMY_PREFIX):
            name = model.removeprefix(DUMMY_PREFIX)
            model = str(write_dummy_model(name, self._folder / "models" / name).absolute())
        return replace(server, model=model, port=free_port())

    def _wait_for(self, process: ProcessTree, text: str, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while text not in process.log_path.read_text(errors="replace"):
            self._check(process)
            if time.monotonic() > end:
                raise process.failure(f"not ready after {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)

    def _check(self, process: ProcessTree) -> None:
        if process.exit_code is None:
            return
        own = [
            line
            for line in process.log_path.read_text(errors="replace").splitlines()
            if line.startswith("swiftcache") and "ending " not in line
        ]
        if own:
            raise BenchmarkError(f"{own[-1]} ({process.log_path})")
        raise process.failure(f"{process.command[3]} ended with exit code {process.exit_code}")
