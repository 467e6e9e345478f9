"""What moved between the device and donors: bytes by link and by donor, and how long loads took."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Literal, TypeAlias

import numpy as np

from swiftcache_tier.receiver.tier import KEPT_DURATIONS, DonorTier

Direction: TypeAlias = Literal["load", "store"]
DIRECTIONS: tuple[Direction, ...] = ("load", "store")

# Of `LinkKind`: what goes over which wires. Memory of the receiver's own GPU, and host memory read
# by a CPU, go over neither.
_WIRES = {"nvlink": "nvlink", "host": "pcie", "pcie-peer": "pcie", "unknown": "pcie"}
WIRES = ("nvlink", "pcie", "local")


class Traffic:
    """Counts of one pool. Scheduler thread only.

    A load reads donor memory, a store writes it; a block that is moved between donors is both. What
    was queued counts as moved: on a GPU it may still be under way.
    """

    def __init__(self, tier: DonorTier, block_bytes: int, *, on_gpu: bool) -> None:
        """``on_gpu``: whether the pool is in a GPU's memory, so that host memory is across PCIe."""
        self._tier = tier
        self._block_bytes = block_bytes
        self._on_gpu = on_gpu
        self.bytes_by_wire = {wire: dict.fromkeys(DIRECTIONS, 0) for wire in WIRES}
        self.bytes_by_donor: dict[str, dict[Direction, int]] = {}
        """By name, those that are gone included."""
        self.hit_blocks_by_donor: dict[str, int] = {}
        """Blocks that a request's prefix lay in: loaded, or taken over by a layer window."""
        self.load_seconds: deque[float] = deque(maxlen=KEPT_DURATIONS)
        """Of the loads that finished since a reader last emptied it."""
        self._load_start_s = 0.0

    def load_begins(self, blocks: np.ndarray) -> None:
        """``blocks``, ids int64 [n], are loaded for a request, from now on."""
        self._load_start_s = time.perf_counter()
        counts = self._by_donor(blocks)
        self._count("load", counts)
        self._hit(counts)

    def hit(self, blocks: np.ndarray) -> None:
        """A request's prefix lies in ``blocks``, ids int64 [n]; that alone moves no byte."""
        self._hit(self._by_donor(blocks))

    def count(self, direction: Direction, blocks: np.ndarray) -> None:
        """``blocks``, ids int64 [n], are read or written whole."""
        self._count(direction, self._by_donor(blocks))

    def _hit(self, counts: dict[int, int]) -> None:
        names = self._tier.donor_names()
        for key, count in counts.items():
            name = names[key]
            self.hit_blocks_by_donor[name] = self.hit_blocks_by_donor.get(name, 0) + count

    def _count(self, direction: Direction, counts: dict[int, int]) -> None:
        kinds, names = self._tier.link_kinds(), self._tier.donor_names()
        for key, count in counts.items():
            moved = count * self._block_bytes
            wire = _WIRES.get(kinds[key], "local") if self._on_gpu else "local"
            self.bytes_by_wire[wire][direction] += moved
            by_donor = self.bytes_by_donor.setdefault(names[key], dict.fromkeys(DIRECTIONS, 0))
            by_donor[direction] += moved

    def _by_donor(self, blocks: np.ndarray) -> dict[int, int]:
        """How many of them each donor has, by key."""
        counts = np.bincount(self._tier.donor_of(blocks))
        return {key: int(counts[key]) for key in np.flatnonzero(counts).tolist()}

    def load_has_ended(self) -> None:
        """The load that was named last is over; on a GPU, its events say how long it took."""
        self.load_seconds.append(time.perf_counter() - self._load_start_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            "bytes_by_wire": {wire: dict(moved) for wire, moved in self.bytes_by_wire.items()},
            "bytes_by_donor": {name: dict(moved) for name, moved in self.bytes_by_donor.items()},
            "hit_blocks_by_donor": dict(self.hit_blocks_by_donor),
        }
