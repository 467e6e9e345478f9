"""Who holds which extent: the table of a lease's life, and the books both sides keep by it."""

from __future__ import annotations

from swiftcache_tier.lease.ledger import LeaseLedger, OfferAnswer, ReclaimAnswer
from swiftcache_tier.lease.table import Grant, LeaseTable
from swiftcache_tier.lease.transitions import TRANSITIONS, LeaseEvent, LeaseState, next_state

__all__ = [
    "TRANSITIONS",
    "Grant",
    "LeaseEvent",
    "LeaseLedger",
    "LeaseState",
    "LeaseTable",
    "OfferAnswer",
    "ReclaimAnswer",
    "next_state",
]
