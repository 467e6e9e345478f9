"""The life of a lease, as a table that donor and receiver share."""

from __future__ import annotations

from enum import StrEnum


class LeaseState(StrEnum):
    """Of one extent. A receiver may have the memory mapped in every state but FREE."""

    FREE = "free"
    OFFERED = "offered"
    LENT = "lent"
    RECLAIMING = "reclaiming"
    ORPHANED = "orphaned"
    DEGRADED = "degraded"  # asked back, and not released by the deadline


class LeaseEvent(StrEnum):
    """What happens to the lease of one extent."""

    OFFER = "offer"
    ACCEPT = "accept"
    DECLINE = "decline"  # the receiver has not mapped it, and will not under this grant
    RECLAIM = "reclaim"
    RELEASE = "release"  # the receiver has unmapped it, and will not map it under this grant
    SILENCE = "silence"  # no heartbeat for too long
    RESUME = "resume"
    GONE = "gone"  # the receiver's process has ended
    EXPIRE = "expire"  # the deadline of a reclaim has passed


_FREE, _OFFERED, _LENT = LeaseState.FREE, LeaseState.OFFERED, LeaseState.LENT
_RECLAIMING, _ORPHANED = LeaseState.RECLAIMING, LeaseState.ORPHANED
_DEGRADED = LeaseState.DEGRADED

TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_FREE, LeaseEvent.OFFER): _OFFERED,
    (_OFFERED, LeaseEvent.ACCEPT): _LENT,
    (_OFFERED, LeaseEvent.DECLINE): _FREE,
    (_OFFERED, LeaseEvent.RECLAIM): _RECLAIMING,
    (_OFFERED, LeaseEvent.RELEASE): _FREE,
    (_OFFERED, LeaseEvent.SILENCE): _ORPHANED,
    (_OFFERED, LeaseEvent.GONE): _FREE,
    (_LENT, LeaseEvent.DECLINE): _FREE,  # fell silent while it was offered, then resumed
    (_LENT, LeaseEvent.RECLAIM): _RECLAIMING,
    (_LENT, LeaseEvent.RELEASE): _FREE,
    (_LENT, LeaseEvent.SILENCE): _ORPHANED,
    (_LENT, LeaseEvent.GONE): _FREE,
    (_RECLAIMING, LeaseEvent.DECLINE): _FREE,
    (_RECLAIMING, LeaseEvent.RELEASE): _FREE,
    (_RECLAIMING, LeaseEvent.SILENCE): _ORPHANED,
    (_RECLAIMING, LeaseEvent.GONE): _FREE,
    (_RECLAIMING, LeaseEvent.EXPIRE): _DEGRADED,
    # Silent or not: nothing can revoke a descriptor, so only these end it.
    (_DEGRADED, LeaseEvent.DECLINE): _FREE,
    (_DEGRADED, LeaseEvent.RELEASE): _FREE,
    (_DEGRADED, LeaseEvent.GONE): _FREE,
    (_ORPHANED, LeaseEvent.DECLINE): _FREE,
    (_ORPHANED, LeaseEvent.RELEASE): _FREE,
    (_ORPHANED, LeaseEvent.RESUME): _LENT,
    (_ORPHANED, LeaseEvent.GONE): _FREE,
}
"""Whatever is not in the table changes nothing: messages may come late, twice or not at all."""


def next_state(state: LeaseState, event: LeaseEvent) -> LeaseState:
    """The state after `event`, which is `state` itself where the table has no entry."""
    return TRANSITIONS.get((state, event), state)
