"""What an operator lets a donor lend at most: in all, to each receiver, to one by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from swiftcache_tier.control.messages import ErrorCode, MessageError

NAMES_MAX = 64
"""Receivers that have a limit of their own."""


@dataclass
class Limits:
    """In extents; None where there is no limit."""

    total: int | None = None
    each: int | None = None
    """Of every receiver that has no limit of its own."""
    by_name: dict[str, int] = field(default_factory=dict)

    def of_all(self, extents: int) -> int:
        """How many of `extents` may be lent."""
        return extents if self.total is None else min(extents, self.total)

    def of(self, receiver: str, wanted: int) -> int:
        """How many of those that it wants a receiver of that name may hold."""
        limit = self.by_name.get(receiver, self.each)
        return wanted if limit is None else min(wanted, limit)

    def set(self, receiver: str | None, each: bool, extents: int | None) -> None:
        """Limit the receiver of that name, or each of them, or else all together.

        Raises MessageError for more names than fit into an answer.
        """
        if receiver is not None:
            self.by_name.pop(receiver, None)
            if extents is not None and len(self.by_name) >= NAMES_MAX:
                raise MessageError(
                    ErrorCode.FULL,
                    f"{len(self.by_name)} receivers have limits of their own, the most that there "
                    f"may be: lift one, or limit each receiver",
                )
            if extents is not None:
                self.by_name[receiver] = extents
        elif each:
            self.each = extents
        else:
            self.total = extents
