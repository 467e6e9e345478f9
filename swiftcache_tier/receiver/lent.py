"""The extents that one donor lends: entered in the ledger, mapped, unmapped."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from swiftcache_tier.control.complaints import Complaints
from swiftcache_tier.control.messages import Offer, Reclaim
from swiftcache_tier.extents import AddressRange, MapRequest
from swiftcache_tier.extents.neighbours import runs_of
from swiftcache_tier.lease import LeaseLedger, LeaseState, ReclaimAnswer

logger = logging.getLogger(__name__)

# Unmapped in one call: it saves calls in GPU memory, where each waits for the interpreter lock, but
# takes some 40 ms for each extent of host memory that is locked for a GPU.
EXTENTS_PER_CALL = 8


class OfferOutcome(NamedTuple):
    """What to answer to a part of an offer, and which extents can be used because of it."""

    accept: list[int]
    decline: list[int]
    mapped: list[int]


class LentExtents:
    """Keeps the ledger and the address range in step. Used by the control thread.

    Mapping an extent of host memory for a GPU takes some 40 ms, so a whole offer is taken, and
    extents are given back, in slices between which other work of the thread can be done.
    """

    def __init__(
        self,
        address_range: AddressRange,
        offset_bytes: int,
        extent_bytes: int,
        extents: int,
        slice_s: float,
    ) -> None:
        """Slot i of the donor is mapped at `offset_bytes + i * extent_bytes`."""
        self._address_range = address_range
        self._offset_bytes = offset_bytes
        self._extent_bytes = extent_bytes
        self._slice_s = slice_s
        self._complaints = Complaints(logger)
        self._ledger = LeaseLedger(extents)
        self._asked: set[int] = set()
        self._to_unmap: set[int] = set()
        self.held = 0
        """Extents that are mapped."""
        self.problem: str | None = None
        """Why an extent could not be mapped, the last time that one could not."""

    def offer(self, offer: Offer, descriptors: Sequence[int]) -> Iterator[OfferOutcome]:
        """Map what is new, slice by slice; what was yielded is to be answered before the next.

        Each slice stands for itself: a reclaim that comes between two holds for what is mapped by
        then, and keeps the rest from being mapped. The descriptors stay the caller's.
        """
        if len(offer.slots) != len(descriptors):
            self._complaints.note(
                "descriptors",
                f"declined an offer of {len(offer.slots)} extents that came with "
                f"{len(descriptors)} descriptors: expected one for each; restart the donor in this "
                f"version",
            )
            yield self._refuse(offer.grant, offer.slots)
            return
        left = deque(zip(offer.slots, descriptors, strict=True))
        while left:
            yield self._map_some(offer.grant, left)

    def reclaim(self, message: Reclaim) -> ReclaimAnswer:
        """Enter a reclaim; each slot that is to be vacated is named the first time only."""
        answer = self._ledger.reclaim(message.grant, message.slots)
        vacate = [slot for slot in answer.vacate if slot not in self._asked]
        self._asked.update(vacate)
        return ReclaimAnswer(vacate, answer.released)

    def release(self, slots: Iterable[int]) -> None:
        """Nothing uses `slots` any more: `unmap_some` is to unmap them."""
        self._to_unmap.update(slots)

    def release_all(self) -> None:
        """Nothing uses any slot any more."""
        self.release(self._ledger.held())

    def unmap_some(self) -> dict[int, list[int]]:
        """Unmap released slots for one slice of time. Returns those that are unmapped, by grant.

        Nothing when nothing is left, or when the system refuses: then try again later.
        """
        end_s = time.monotonic() + self._slice_s
        unmapped: list[int] = []
        for run in runs_of(self._to_unmap, EXTENTS_PER_CALL):
            try:
                self._address_range.unmap(self._place(run[0]), len(run) * self._extent_bytes)
            except OSError as error:
                logger.error("extents %d to %d cannot be unmapped yet: %s", run[0], run[-1], error)
                break
            unmapped.extend(run)
            if time.monotonic() >= end_s:
                break
        self._to_unmap.difference_update(unmapped)
        self._asked.difference_update(unmapped)
        self.held -= len(unmapped)
        return self._ledger.released(unmapped)

    def lose(self) -> None:
        """The donor is lost."""
        self._ledger.silence()

    def counts(self) -> dict[LeaseState, int]:
        """Extents by state."""
        return self._ledger.counts()

    def mapped_address(self) -> int:
        """Where one of the extents is that are mapped, of which there is one at least."""
        return self._address_range.base + self._place(self._ledger.held()[0])

    def _map_some(self, grant: int, left: deque[tuple[int, int]]) -> OfferOutcome:
        """Map for one slice of time, taking slots and descriptors out of `left`.

        When one cannot be mapped, all that is left is declined with it.
        """
        end_s = time.monotonic() + self._slice_s
        outcome = OfferOutcome([], [], [])
        entered: list[int] = []

        def requests() -> Iterator[MapRequest]:
            while left:
                slot, descriptor = left.popleft()
                answer = self._ledger.offer(grant, [slot])
                outcome.accept.extend(answer.held)
                outcome.decline.extend(answer.refused)
                if answer.new:
                    entered.append(slot)
                    yield MapRequest(self._place(slot), descriptor, self._extent_bytes)
                if time.monotonic() >= end_s:
                    return

        mapped, problem = self._address_range.map_each(requests())
        self._ledger.mapped(entered[:mapped])
        self.held += mapped
        outcome.accept.extend(entered[:mapped])
        outcome.mapped.extend(entered[:mapped])
        if problem is not None:
            self._complaints.note(
                "extent",
                f"extent {entered[mapped]} of an offer is declined, and those after it: {problem}",
            )
            self.problem = str(problem)
            self._ledger.declined(entered[mapped:])
            rest = self._refuse(grant, [slot for slot, _ in left])
            outcome.accept.extend(rest.accept)
            outcome.decline.extend(entered[mapped:] + rest.decline)
            left.clear()
        return outcome

    def _refuse(self, grant: int, slots: Sequence[int]) -> OfferOutcome:
        """Take nothing of an offer that is not mapped already."""
        answer = self._ledger.offer(grant, slots)
        self._ledger.declined(answer.new)
        return OfferOutcome(answer.held, answer.new + answer.refused, [])

    def _place(self, slot: int) -> int:
        return self._offset_bytes + slot * self._extent_bytes
