"""A stage whose victim is a serving engine that lends its own KV memory while it is idle."""

from __future__ import annotations

from typing import Any

import psutil

from faults.stage import (
    ANSWER_TOKENS,
    DEADLINE_S,
    DONOR_SIZE,
    ENGINE_FLAGS,
    LEAKED_FILES_MAX,
    SERVER_ENV,
    START_DEADLINE_S,
    Stage,
    scheduler_of,
)
from support.processes import started_by
from support.server import Server

# As much KV memory as a donor lends, 16 MiB, of which an idle engine lends 70 %.
POOL_TOKENS = 16384
LENT_LEAST = 0.6


class EngineStage(Stage):
    """One donor, one engine that lends and is the victim, and a server on both."""

    def start_victim(self) -> None:
        folder = self.scratch / "engine"
        folder.mkdir()
        self.engine = self.resources.enter_context(
            Server(
                self.model,
                *("--max-total-tokens", str(POOL_TOKENS), "--swiftcache-donate", "auto"),
                *ENGINE_FLAGS,
                *("--swiftcache-runtime-dir", str(self.runtime_dir)),
                tmp_path=folder,
                env=SERVER_ENV | {"SWIFTCACHE_EXTENT_BYTES": DONOR_SIZE["extent_size"]},
                deadline_s=START_DEADLINE_S,
            )
        )

    def restart_victim(self) -> None:
        """On the same port, so under the same name."""
        self.engine.start()

    def kill_victim(self) -> None:
        self.engine.stop()

    def stop_victim(self) -> None:
        for process in self._processes():
            process.suspend()

    def continue_victim(self) -> None:
        for process in self._processes():
            process.resume()

    def victim_lends(self, donor: dict[str, Any]) -> bool:
        """Most of its pool, with nothing on its way, and both sides of one mind about it."""
        lent = donor["extents"]["lent"]
        if donor["pid"] != scheduler_of(self.engine).pid or lent < LENT_LEAST * self.extents():
            return False
        extents = self.engine.swiftcache()["donation"]["extents"]
        return bool(lent == extents["lent"] == sum(extents.values()) - extents["free"])

    def take_stock(self) -> None:
        super().take_stock()
        self.ask_engine(self.prompts[0])
        self.engine.flush(DEADLINE_S)
        self._engine_files_before = scheduler_of(self.engine).num_fds()

    def ask_engine(self, prompt: list[int]) -> list[int]:
        [answer] = self.engine.generate(prompt, ANSWER_TOKENS, timeout_s=DEADLINE_S)
        return list(answer["output_ids"])

    def engine_leaks(self) -> list[str]:
        """What the engine has left over, a line for each."""
        self.engine.flush(DEADLINE_S)
        found = []
        donation = self.engine.swiftcache()["donation"]
        if donation["aborted_requests"]:
            found.append(f"the engine aborted {donation['aborted_requests']} requests")
        files = scheduler_of(self.engine).num_fds() - self._engine_files_before
        if files > LEAKED_FILES_MAX:
            found.append(f"the engine has {files} descriptors more than at the start")
        return found

    def _processes(self) -> list[psutil.Process]:
        leader = self.engine.process
        return [psutil.Process(leader.pid), *started_by(leader)]
