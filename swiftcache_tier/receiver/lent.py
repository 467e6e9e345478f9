"""The extents that one donor lends: entered in the ledger, mapped, unmapped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from swiftcache_tier.control.messages import Offer, Reclaim
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import AddressRange
from swiftcache_tier.lease import LeaseLedger, LeaseState, ReclaimAnswer

logger = logging.getLogger(__name__)


class OfferOutcome(NamedTuple):
    """What to answer to an offer, and which extents can be used because of it."""

    accept: list[int]
    decline: list[int]
    mapped: list[int]


class LentExtents:
    """Keeps the ledger and the address range in step. Used by the control thread."""

    def __init__(
        self, address_range: AddressRange, offset_bytes: int, extent_bytes: int, extents: int
    ) -> None:
        """Slot i of the donor is mapped at `offset_bytes + i * extent_bytes`."""
        self._address_range = address_range
        self._offset_bytes = offset_bytes
        self._extent_bytes = extent_bytes
        self._ledger = LeaseLedger(extents)
        self._asked: set[int] = set()
        self._to_unmap: set[int] = set()
        self.held = 0
        """Extents that are mapped."""

    def offer(self, offer: Offer, descriptors: Sequence[int]) -> OfferOutcome:
        """Map what is new. The descriptors stay the caller's."""
        answer = self._ledger.offer(offer.grant, offer.slots)
        if not answer.new:
            return OfferOutcome(answer.held, answer.refused, [])
        try:
            self._map(answer.new, descriptors)
        except (SwiftCacheError, OSError) as error:
            logger.error("declined %d extents: %s", len(answer.new), error)
            self._ledger.declined(answer.new)
            return OfferOutcome([], answer.new, [])
        self._ledger.mapped(answer.new)
        self.held += len(answer.new)
        return OfferOutcome(answer.new, [], answer.new)

    def reclaim(self, message: Reclaim) -> ReclaimAnswer:
        """Enter a reclaim; each slot that is to be vacated is named the first time only."""
        answer = self._ledger.reclaim(message.grant, message.slots)
        vacate = [slot for slot in answer.vacate if slot not in self._asked]
        self._asked.update(vacate)
        return ReclaimAnswer(vacate, answer.released)

    def release(self, slots: Iterable[int]) -> dict[int, list[int]]:
        """Unmap `slots`, which nothing uses any more. Returns those that are, by grant.

        What the system refuses to unmap is tried again at the next call.
        """
        self._to_unmap.update(slots)
        unmapped = []
        for slot in sorted(self._to_unmap):
            try:
                self._address_range.unmap(self._place(slot), self._extent_bytes)
            except OSError as error:
                logger.error("extent %d cannot be unmapped yet: %s", slot, error)
                break
            unmapped.append(slot)
        self._to_unmap.difference_update(unmapped)
        self._asked.difference_update(unmapped)
        self.held -= len(unmapped)
        return self._ledger.released(unmapped)

    def release_all(self) -> dict[int, list[int]]:
        """Unmap everything."""
        return self.release(self._ledger.held())

    def lose(self) -> None:
        """The donor is lost."""
        self._ledger.silence()

    def counts(self) -> dict[LeaseState, int]:
        """Extents by state."""
        return self._ledger.counts()

    def _map(self, slots: Sequence[int], descriptors: Sequence[int]) -> None:
        """All or none."""
        if len(slots) != len(descriptors):
            raise SwiftCacheError(
                f"an offer of {len(slots)} extents came with {len(descriptors)} descriptors: "
                f"expected one for each; restart the donor in this version"
            )
        mapped: list[int] = []
        try:
            for slot, descriptor in zip(slots, descriptors, strict=True):
                self._address_range.map(self._place(slot), descriptor, self._extent_bytes)
                mapped.append(slot)
        except BaseException:
            for slot in mapped:
                self._address_range.unmap(self._place(slot), self._extent_bytes)
            raise

    def _place(self, slot: int) -> int:
        return self._offset_bytes + slot * self._extent_bytes
