"""The donor's book of leases. No input or output, and no clock: times are passed in."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from swiftcache_tier.lease.transitions import LeaseEvent, LeaseState, next_state


class Grant(NamedTuple):
    """Extents of one donor under one grant number; numbers rise and are never used again."""

    number: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class _Lease:
    state: LeaseState = LeaseState.FREE
    receiver: str | None = None
    grant: int = 0
    since_s: float = 0.0


class LeaseTable:
    """Leases of a donor's extents, which are slots 0 to n-1.

    An extent that a receiver held is dirty when it becomes FREE, and is offered again only after
    `scrubbed`. One that the donor uses itself is kept: FREE too, and not offered. Receivers are
    named by any string that is theirs alone. An event that does not match the present lease of an
    extent (other receiver, other grant, not in the transition table, no such extent) changes
    nothing. Every transition of an extent costs the same whatever the number of extents; handing
    one out adds the logarithm of a heap.
    """

    def __init__(self, extents: int, *, kept: bool = False) -> None:
        """All extents may be offered at first or, if `kept`, none."""
        self._leases = [_Lease() for _ in range(extents)]
        # a heap: low slots first keeps leases in runs
        self._clean = [] if kept else list(range(extents))
        self._kept = set(range(extents)) if kept else set[int]()
        self._dirty: set[int] = set()
        self._counts = dict.fromkeys(LeaseState, 0) | {LeaseState.FREE: extents}
        self._held: dict[str, dict[LeaseState, set[int]]] = {}
        self._grants: dict[int, set[int]] = {}
        self._last_grant = 0

    @property
    def dirty(self) -> frozenset[int]:
        """Extents that are free and must be scrubbed."""
        return frozenset(self._dirty)

    @property
    def kept(self) -> int:
        """Extents that the donor uses itself."""
        return len(self._kept)

    @property
    def clean(self) -> int:
        """Extents that could be offered now."""
        return len(self._clean)

    def counts(self) -> dict[LeaseState, int]:
        """Extents by state."""
        return dict(self._counts)

    def counts_of(self, receiver: str) -> dict[LeaseState, int]:
        """Extents by state that `receiver` holds; FREE is always 0."""
        held = self._held.get(receiver, {})
        return {state: len(held.get(state, ())) for state in LeaseState}

    def state(self, slot: int) -> LeaseState:
        return self._leases[slot].state

    def holder(self, slot: int) -> str | None:
        """The receiver that holds `slot`; None when it is free."""
        return self._leases[slot].receiver

    def is_offered(self, grant: Grant) -> bool:
        """Whether every extent of `grant` still waits for the receiver's answer."""
        return all(
            self._leases[slot].grant == grant.number
            and self._leases[slot].state is LeaseState.OFFERED
            for slot in grant.slots
        )

    def offer(self, receiver: str, extents: int, now_s: float) -> Grant | None:
        """Offer up to `extents` clean extents under a new grant; None when there are none."""
        slots = tuple(heapq.heappop(self._clean) for _ in range(min(extents, len(self._clean))))
        if not slots:
            return None
        self._last_grant += 1
        for slot in slots:
            lease = self._leases[slot]
            lease.receiver, lease.grant = receiver, self._last_grant
            self._apply(slot, LeaseEvent.OFFER, now_s)
        self._grants[self._last_grant] = set(slots)
        return Grant(self._last_grant, slots)

    def apply(
        self,
        event: LeaseEvent,
        receiver: str,
        grant: int,
        slots: Iterable[int],
        now_s: float,
    ) -> list[int]:
        """Apply `event` to those of `slots` that `receiver` holds under `grant`.

        Returns those that became FREE by it, and so are dirty.
        """
        freed = []
        for slot in self._grants.get(grant, set()).intersection(slots):
            if self._leases[slot].receiver == receiver:
                freed += self._apply(slot, event, now_s)
        return freed

    def apply_to_all(self, event: LeaseEvent, receiver: str, now_s: float) -> list[int]:
        """Apply `event` to all that `receiver` holds. Returns those that became FREE by it."""
        held = [slot for slots in self._held.get(receiver, {}).values() for slot in slots]
        return [freed for slot in held for freed in self._apply(slot, event, now_s)]

    def reclaim(self, receiver: str, extents: int, now_s: float) -> list[int]:
        """Ask up to `extents` LENT extents back, high slots first. Returns them."""
        lent = self._held.get(receiver, {}).get(LeaseState.LENT, set())
        slots = heapq.nlargest(extents, lent)
        for slot in slots:
            self._apply(slot, LeaseEvent.RECLAIM, now_s)
        return slots

    def withdraw_offers(self, receiver: str, older_than_s: float, now_s: float) -> list[int]:
        """Ask back what was offered to `receiver` before `now_s - older_than_s`. Returns it."""
        offered = self._held.get(receiver, {}).get(LeaseState.OFFERED, set())
        late = [slot for slot in offered if self._leases[slot].since_s < now_s - older_than_s]
        for slot in late:
            self._apply(slot, LeaseEvent.RECLAIM, now_s)
        return late

    def reclaiming(self, receiver: str) -> dict[int, list[int]]:
        """Slots asked back from `receiver` that it has not released, late ones too, by grant."""
        by_grant: dict[int, list[int]] = {}
        held = self._held.get(receiver, {})
        asked = held.get(LeaseState.RECLAIMING, set()) | held.get(LeaseState.DEGRADED, set())
        for slot in sorted(asked):
            by_grant.setdefault(self._leases[slot].grant, []).append(slot)
        return by_grant

    def expire(self, receiver: str, older_than_s: float, now_s: float) -> list[int]:
        """Give up on reclaims asked of `receiver` before `now_s - older_than_s`. Returns them."""
        asked = self._held.get(receiver, {}).get(LeaseState.RECLAIMING, set())
        late = [slot for slot in asked if self._leases[slot].since_s < now_s - older_than_s]
        for slot in late:
            self._apply(slot, LeaseEvent.EXPIRE, now_s)
        return late

    def asked_since_s(self, receiver: str) -> float | None:
        """When the oldest reclaim that `receiver` may still answer in time began; None without."""
        slots = self._held.get(receiver, {}).get(LeaseState.RECLAIMING, ())
        return min((self._leases[slot].since_s for slot in slots), default=None)

    def scrubbed(self, slot: int) -> None:
        """The memory of a dirty extent reads as zeros now and is out of its last holder's reach."""
        self._dirty.remove(slot)
        heapq.heappush(self._clean, slot)

    def put(self, slot: int) -> None:
        """A kept extent, which reads as zeros, may be offered from now on."""
        self._kept.remove(slot)
        heapq.heappush(self._clean, slot)

    def keep_dirty(self) -> list[int]:
        """The donor uses all dirty extents itself from now on. Returns them."""
        slots = sorted(self._dirty)
        self._kept.update(slots)
        self._dirty.clear()
        return slots

    def keep_clean(self, extents: int) -> list[int]:
        """The donor uses up to so many clean extents itself, high slots first. Returns them."""
        slots = heapq.nlargest(extents, self._clean)
        self._kept.update(slots)
        self._clean = [slot for slot in self._clean if slot not in self._kept]
        heapq.heapify(self._clean)
        return slots

    def _apply(self, slot: int, event: LeaseEvent, now_s: float) -> list[int]:
        """One transition; returns `[slot]` if the extent became FREE."""
        lease = self._leases[slot]
        state = next_state(lease.state, event)
        if state is lease.state or lease.receiver is None:
            return []
        held = self._held.setdefault(lease.receiver, {})
        if lease.state is not LeaseState.FREE:
            held[lease.state].remove(slot)
        self._counts[lease.state] -= 1
        self._counts[state] += 1
        lease.state, lease.since_s = state, now_s
        if state is not LeaseState.FREE:
            held.setdefault(state, set()).add(slot)
            return []
        self._end(slot, lease.receiver)
        return [slot]

    def _end(self, slot: int, receiver: str) -> None:
        lease = self._leases[slot]
        lease.receiver = None
        self._dirty.add(slot)
        if not any(self._held[receiver].values()):
            del self._held[receiver]
        self._grants[lease.grant].remove(slot)
        if not self._grants[lease.grant]:
            del self._grants[lease.grant]
