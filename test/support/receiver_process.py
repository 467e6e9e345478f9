"""A receiver in a process of its own, for tests that stop or kill it.

Reads commands, one JSON list a line, and answers each with one JSON line. Polls the tier all the
time; with `vacate` on (as at the start), blocks that must be vacated are freed at once.
"""

from __future__ import annotations

import ctypes
import json
import select
import sys
from pathlib import Path
from typing import Any

import numpy as np

from swiftcache_tier.receiver import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs

POLL_S = 0.01


class Receiver:
    """One method for each command."""

    def __init__(self, tier: DonorTier) -> None:
        self.tier = tier
        self.vacating = True
        self.used: set[int] = set()

    def step(self) -> None:
        self.tier.poll()
        doomed = self.tier.must_vacate()
        if self.vacating and doomed.size:
            self.tier.free(doomed)
            self.used.difference_update(doomed.tolist())
            self.tier.poll()

    def fill(self, value: int) -> int:
        """Take all free blocks and write `value` to each byte."""
        ids = self.tier.alloc(self.tier.free_blocks)
        assert ids is not None
        for address in self.tier.addresses(ids):
            ctypes.memset(int(address), value, self.tier.block_bytes)
        self.used.update(ids.tolist())
        return len(ids)

    def bytes_seen(self) -> list[int]:
        """Which byte values the blocks in use hold."""
        seen: set[int] = set()
        for address in self.tier.addresses(np.array(sorted(self.used), dtype=np.int64)):
            seen.update(ctypes.string_at(int(address), self.tier.block_bytes))
        return sorted(seen)

    def take(self) -> list[int]:
        """Take all free blocks; which byte values they hold."""
        ids = self.tier.alloc(self.tier.free_blocks)
        assert ids is not None
        self.used.update(ids.tolist())
        return self.bytes_seen()

    def vacate(self, on: bool) -> None:
        self.vacating = on

    def status(self) -> dict[str, Any]:
        return self.tier.status()

    def close(self) -> None:
        self.tier.close()


def main() -> None:
    runtime_dir, block_bytes, name, *specs = sys.argv[1:]
    tier = DonorTier(
        parse_specs(specs),
        int(block_bytes),
        settings=Settings.from_env(),
        runtime_dir=Path(runtime_dir),
        receiver_name=name,
    )
    tier.start()
    receiver = Receiver(tier)
    print(json.dumps("ready"), flush=True)
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        receiver.step()
        if not readable:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(receiver, command)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
