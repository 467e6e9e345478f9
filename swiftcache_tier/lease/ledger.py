"""The receiver's book of what one donor lent it. No input or output, and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swiftcache_tier.lease.transitions import LeaseEvent, LeaseState, next_state


class OfferAnswer(NamedTuple):
    """What becomes of each slot of an offer."""

    new: list[int]
    """To be mapped; then call `mapped`, or `declined` if that fails. All of the slots or none."""
    held: list[int]
    """Mapped already under this grant: accept them again."""
    refused: list[int]
    """Not mapped under this grant, now or ever: decline them."""


class ReclaimAnswer(NamedTuple):
    """What becomes of each slot of a reclaim."""

    vacate: list[int]
    """Mapped under this grant: vacate, unmap, then call `released`."""
    released: list[int]
    """Not mapped under this grant, now or ever."""


@dataclass(slots=True)
class _Slot:
    state: LeaseState = LeaseState.FREE
    grant: int = 0
    """The present grant or, when FREE, the last that ended: nothing up to it is mapped again."""


class LeaseLedger:
    """What a receiver holds of one donor, by the same transition table as the donor's.

    Grant numbers of a donor rise. So one number for each extent is enough to refuse an offer that
    comes late or twice, after its lease has ended.
    """

    def __init__(self, extents: int) -> None:
        self._slots = [_Slot() for _ in range(extents)]

    def offer(self, grant: int, slots: Sequence[int]) -> OfferAnswer:
        """Enter an offer; the new extents are OFFERED then."""
        entries = {slot: self._slots[slot] for slot in slots if 0 <= slot < len(self._slots)}
        is_free = {slot: entry.state is LeaseState.FREE for slot, entry in entries.items()}
        if all(is_free[slot] and entry.grant < grant for slot, entry in entries.items()):
            for entry in entries.values():
                entry.grant = grant
                entry.state = next_state(entry.state, LeaseEvent.OFFER)
            return OfferAnswer(list(entries), [], [])
        answer = OfferAnswer([], [], [])
        for slot, entry in entries.items():
            if is_free[slot]:
                entry.grant = max(entry.grant, grant)
                answer.refused.append(slot)
            else:
                (answer.held if entry.grant == grant else answer.refused).append(slot)
        return answer

    def mapped(self, slots: Iterable[int]) -> None:
        """The extents of an offer are mapped."""
        self._apply(LeaseEvent.ACCEPT, slots)

    def declined(self, slots: Iterable[int]) -> None:
        """The extents of an offer could not be mapped."""
        self._apply(LeaseEvent.DECLINE, slots)

    def reclaim(self, grant: int, slots: Iterable[int]) -> ReclaimAnswer:
        """Enter a reclaim. Of a grant not seen yet, the offer is refused when it comes."""
        answer = ReclaimAnswer([], [])
        for slot in slots:
            if not 0 <= slot < len(self._slots):
                continue
            entry = self._slots[slot]
            if entry.state is LeaseState.FREE:
                entry.grant = max(entry.grant, grant)
                answer.released.append(slot)
            elif entry.grant == grant:
                entry.state = next_state(entry.state, LeaseEvent.RECLAIM)
                answer.vacate.append(slot)
            else:
                answer.released.append(slot)
        return answer

    def released(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """The extents are unmapped. Returns those that were held, by grant."""
        by_grant: dict[int, list[int]] = {}
        for slot in slots:
            if self._slots[slot].state is not LeaseState.FREE:
                by_grant.setdefault(self._slots[slot].grant, []).append(slot)
        self._apply(LeaseEvent.RELEASE, slots)
        return by_grant

    def silence(self) -> None:
        """The donor is lost. What it lent stays mapped until it is released."""
        self._apply(LeaseEvent.SILENCE, range(len(self._slots)))

    def held(self) -> list[int]:
        """Slots that are mapped."""
        return [
            slot for slot, entry in enumerate(self._slots) if entry.state is not LeaseState.FREE
        ]

    def counts(self) -> dict[LeaseState, int]:
        """Extents by state."""
        counts = dict.fromkeys(LeaseState, 0)
        for entry in self._slots:
            counts[entry.state] += 1
        return counts

    def _apply(self, event: LeaseEvent, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots[slot].state = next_state(self._slots[slot].state, event)
