"""A receiver without a model, in the test's process: it takes what it is lent, and writes on it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from support.raw_memory import peek, poke
from swiftcache_tier.receiver import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs

POLL_S = 0.005
# Long against what a busy machine does to a process.
SETTINGS = replace(
    Settings(), heartbeat_s=0.1, lost_after_s=30.0, status_timeout_s=15.0, discovery_interval_s=0.1,
    address_space_bytes=1 << 30,
)  # fmt: skip


class Borrower:
    """Polls in a thread of its own, and vacates what is asked back as long as ``vacating``."""

    def __init__(
        self, spec: str, runtime_dir: Path, block_bytes: int, name: str = "borrower"
    ) -> None:
        self.vacating = True
        self.lost_blocks = 0
        """Blocks that were in use when they were asked back."""
        self._content: dict[int, bytes] = {}
        self._tier = DonorTier(
            parse_specs([spec]),
            block_bytes,
            settings=SETTINGS,
            runtime_dir=runtime_dir,
            receiver_name=name,
        )
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Self:
        self._tier.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._tier.close()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            size: int = self._tier.status()["bytes"]
        return size

    @property
    def used_blocks(self) -> int:
        with self._lock:
            return len(self._content)

    def fill(self) -> int:
        """Write something different into every free block. Returns how many there were."""
        with self._lock:
            blocks = self._tier.alloc(self._tier.free_blocks)
            assert blocks is not None
            addresses = self._tier.addresses(blocks)
            for block, address in zip(blocks.tolist(), addresses.tolist(), strict=True):
                assert not any(peek(address, self._tier.block_bytes)), "lent memory was not zeroed"
                content = block.to_bytes(4, "big") * (self._tier.block_bytes // 4)
                poke(address, content)
                self._content[block] = content
            return len(blocks)

    def check(self) -> None:
        """Every block that is in use still holds what was written there."""
        with self._lock:
            blocks = np.array(sorted(self._content), dtype=np.int64)
            for block, address in zip(
                blocks.tolist(), self._tier.addresses(blocks).tolist(), strict=True
            ):
                found = peek(address, self._tier.block_bytes)
                assert found == self._content[block], f"block {block} has another owner's bytes"

    def _poll(self) -> None:
        while not self._ending.wait(POLL_S):
            with self._lock:
                self._tier.poll()
                doomed = self._tier.must_vacate()
                if not self.vacating or not doomed.size:
                    continue
                self._tier.free(doomed)
                for block in doomed.tolist():
                    self.lost_blocks += self._content.pop(block, None) is not None
                self._tier.poll()
