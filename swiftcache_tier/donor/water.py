"""When a serving engine lends and when it takes back: by water marks, and by what it needs.

Arithmetic only: what the figures are, and what comes of them, is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError


class Levels(NamedTuple):
    """How the pool of an engine stands, in pages."""

    capacity: int
    """Of the whole pool, what is lent included."""
    free: int
    """Neither lent nor in use."""
    cold: int
    """Hold a prefix that nobody has asked for in a while, and that nobody uses."""
    needed: int
    """What the requests that wait and run may yet take, beyond what they have."""

    @property
    def spare(self) -> int:
        """What could be lent, or is missing where it is negative."""
        return self.free + self.cold - self.needed


@dataclass(frozen=True)
class WaterMarks:
    """Parts of the pool's capacity: `low` < `high` < 1, and `most` of it may be lent.

    Less than `low` spare: take back. More than `high` would be left: lend. Between them nothing
    happens, so that memory does not go back and forth with every request. Raises SwiftCacheError
    for marks that could not work.
    """

    low: float = 0.20
    high: float = 0.30
    most: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high < 1:
            raise SwiftCacheError(
                f"water marks of {self.low:g} (low) and {self.high:g} (high): expected fractions "
                f"of the pool, the low one under the high one and that under 1 (at 1 nothing "
                f"is left to lend), as in 0.2 and 0.3"
            )
        if not 0 < self.most <= 1:
            raise SwiftCacheError(
                f"a donation of {self.most:g}: expected a fraction of the pool, over 0 and at "
                f"most 1"
            )

    def to_lend(self, levels: Levels, extent_pages: float, lent: int, demand: int) -> int:
        """Extents to lend now, beside the `lent`, of which receivers would take `demand`."""
        room = (levels.spare - self.high * levels.capacity) / extent_pages
        left = self.most * levels.capacity / extent_pages - lent
        return max(0, min(demand, math.floor(room), math.floor(left)))

    def to_take_back(self, levels: Levels, extent_pages: float, lent: int, asked: int) -> int:
        """Extents to ask back, beside the `asked` of the `lent` that are on their way already.

        Up to the middle between the marks, so that the next request does not ask again.
        """
        spare = levels.spare + asked * extent_pages
        if spare >= self.low * levels.capacity:
            return 0
        missing = (self.low + self.high) / 2 * levels.capacity - spare
        return min(lent - asked, math.ceil(missing / extent_pages))
