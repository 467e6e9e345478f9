"""What the scheduler thread knows of each donor."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from swiftcache_tier.receiver.events import DonorJoined


@dataclass
class Donation:
    """The slots of one donor, as the block pool has them."""

    joined: DonorJoined
    mapped: set[int] = field(default_factory=set)
    """Retiring ones included."""
    retiring: set[int] = field(default_factory=set)
    gb_per_s: float | None = None
    """As measured; None where it was not."""
    lost: bool = False
    lost_s: float = 0.0
    asked_s: float = 0.0
    """When the donor asked for the oldest reclaim that is not finished."""
    deadline_s: float = 0.0
    """What it was given, from then on."""
    retiring_blocks_seen: int | None = None
    """Blocks in use on retiring slots at the last look; None: look again in any case."""

    def vacated(self, in_use: np.ndarray, block_bytes: int) -> list[int]:
        """Retiring slots that none of the blocks `in_use` touches.

        `in_use` are ids, int64, of this donor's blocks that are retiring and in use.
        """
        starts = in_use * block_bytes - self.joined.offset_bytes
        ends = starts + block_bytes - 1
        # +1 where a block's first slot is, -1 after its last: the running sum counts the blocks.
        steps = np.zeros(self.joined.extents + 1, dtype=np.int64)
        np.add.at(steps, starts // self.joined.extent_bytes, 1)
        np.add.at(steps, ends // self.joined.extent_bytes + 1, -1)
        idle = np.flatnonzero(np.cumsum(steps[:-1]) == 0)
        return sorted(self.retiring.intersection(idle.tolist()))
