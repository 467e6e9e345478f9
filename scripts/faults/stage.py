"""A server, its donors, and prompts with known answers."""

from __future__ import annotations

import random
import signal
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from support.donors import Donor
from support.processes import started_by, wait_until
from support.server import Server

DEADLINE_S = 300.0
START_DEADLINE_S = 900.0
"""Of a server: minutes on a machine that has other work."""
SETTLE_INTERVAL_S = 0.02

# Together more than the device pool, so that the older prompts live on donors alone.
POOL_TOKENS = 1024
PROMPTS = 6
PROMPT_TOKENS = 300
LONG_TOKENS = 900
ANSWER_TOKENS = 8
LONG_ANSWER_TOKENS = 64
STAYS, VICTIM = "ada", "bob"
DONOR_SIZE = {"size": "16MiB", "extent_size": "256KiB"}
ENGINE_FLAGS = ("--page-size", "16", "--chunked-prefill-size", "128", "--random-seed", "1")
SERVER_FLAGS = ("--max-total-tokens", str(POOL_TOKENS), *ENGINE_FLAGS, "--swiftcache-donors")
SERVER_ENV = {
    # SGLang then counts the device pool at each step, and ends if a slot is lost or has two owners.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # And all books of the tier every second.
    "SWIFTCACHE_AUDIT_INTERVAL_S": "1",
}
LEAKED_FILES_MAX = 6


class Stage:
    """Two donors, of which one is the victim, and a server on both; entered, it is warm."""

    def __init__(self, model: Path, scratch: Path, *flags: str) -> None:
        """``flags``: for the server, beside those that every stage has."""
        self.runtime_dir = scratch / "rt"
        self.model, self.scratch, self._flags = model, scratch, flags
        self.resources = ExitStack()
        rng = random.Random(11)
        self.prompts = [_tokens(rng, PROMPT_TOKENS) for _ in range(PROMPTS)]
        self.long_prompt = _tokens(rng, LONG_TOKENS)
        self.expected: list[list[int]] = []
        self.expected_long: list[int] = []
        self.expected_long_answer: list[int] = []
        self.expected_streamed: list[int] = []

    def __enter__(self) -> Self:
        with ExitStack() as on_failure:
            on_failure.callback(self.resources.close)
            self.stays = self.start_donor(STAYS)
            self.start_victim()
            self.start_server()
            self.settle()
            self.expected = [self.ask(prompt) for prompt in self.prompts]
            self.expected_long = self.ask(self.long_prompt)
            self.expected_long_answer = self.ask(self.prompts[-1], LONG_ANSWER_TOKENS)
            self.expected_streamed = self.ask(self.long_prompt, LONG_ANSWER_TOKENS)
            self.take_stock()
            on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.resources.close()

    def start_donor(self, name: str) -> Donor:
        return self.resources.enter_context(Donor(self.runtime_dir, name, **DONOR_SIZE))

    def take_stock(self) -> None:
        """Note what a server holds that is warm and has nothing to do."""
        self.settle()
        self.ask(self.prompts[0])
        self.server.flush(DEADLINE_S)
        self.files_before = self.scheduler().num_fds()

    def start_victim(self) -> None:
        self.victim = self.start_donor(VICTIM)

    def restart_victim(self) -> None:
        """Of one that has ended."""
        self.start_victim()

    def kill_victim(self) -> None:
        self.victim.kill()

    def stop_victim(self) -> None:
        self.victim.process.send_signal(signal.SIGSTOP)

    def continue_victim(self) -> None:
        self.victim.process.send_signal(signal.SIGCONT)

    def start_server(self) -> None:
        self.server = self.resources.enter_context(
            Server(
                self.model,
                *SERVER_FLAGS,
                *("--swiftcache-runtime-dir", str(self.runtime_dir)),
                *self._flags,
                tmp_path=self.scratch,
                env=SERVER_ENV,
                deadline_s=START_DEADLINE_S,
            )
        )

    def scheduler(self) -> psutil.Process:
        return scheduler_of(self.server)

    def ask(self, prompt: list[int], new_tokens: int = ANSWER_TOKENS) -> list[int]:
        return list(self.server.generate(prompt, new_tokens, timeout_s=DEADLINE_S)[0]["output_ids"])

    def tier(self) -> dict[str, Any]:
        return self.server.swiftcache()

    def extents(self) -> int:
        """Of one donor."""
        return (16 << 20) // (256 << 10)

    def without_victim(self) -> bool:
        """Nothing of the victim is left: its memory is vacated and unmapped."""
        tier = self.tier()
        return [d["name"] for d in tier["donors"]] == [STAYS] and settled(tier)

    def whole(self) -> bool:
        """Both donors lend all they can, the present victim among them."""
        tier = self.tier()
        joined = [donor for donor in tier["donors"] if donor["state"] == "joined"]
        victims = [donor for donor in joined if donor["name"] != STAYS]
        return (
            [len(tier["donors"]), len(joined), len(victims)] == [2, 2, 1]
            and settled(tier)
            and all(d["extents"]["lent"] == self.extents() for d in joined if d["name"] == STAYS)
            and self.victim_lends(victims[0])
        )

    def victim_lends(self, donor: dict[str, Any]) -> bool:
        """Whether this is the present victim, and lends all it can. `donor`: as the server has
        it."""
        return (
            donor["pid"] == self.victim.process.pid and donor["extents"]["lent"] == self.extents()
        )

    def settle(self) -> None:
        wait_until(self.whole, DEADLINE_S, "both donors lend all they can", SETTLE_INTERVAL_S)

    def warm(self) -> None:
        """Empty the caches, then put all prompts into the donors' memory, the last on the device.

        Raises AssertionError if an answer is wrong even so, or if nothing lies on the victim.
        """
        self.server.flush(DEADLINE_S)
        for prompt, expected in zip(self.prompts, self.expected, strict=True):
            assert self.ask(prompt) == expected, "a wrong answer without any fault"
        tier = self.tier()
        assert all(donor["blocks"]["used"] for donor in tier["donors"]), f"unused: {tier['donors']}"


def scheduler_of(server: Server) -> psutil.Process:
    """The server's process that has the cache."""
    [found] = [
        process
        for process in started_by(server.process)
        if any("sglang::scheduler" in word for word in process.cmdline()[:1])
    ]
    return found


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(count)]


def settled(tier: dict[str, Any]) -> bool:
    """The identity of blocks holds, and nothing is being vacated or copied again."""
    blocks = tier["blocks"]
    return (
        blocks["retiring"] == 0
        and blocks["total"] == blocks["free"] + blocks["used"]
        and tier["orphaned_extents"] == 0
    )
