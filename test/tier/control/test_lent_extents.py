"""Offers on the receiver's side: mapped in slices, each of which stands for itself."""

from __future__ import annotations

from collections.abc import Iterable

from swiftcache_tier.control.messages import Offer, Reclaim
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import AddressRange, MapOutcome, MapRequest
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.receiver.lent import LentExtents

SIZE = 4096
EXTENTS = 8
BAD = 99
"""A descriptor that cannot be mapped."""


class Range(AddressRange):
    """Keeps which places are mapped, and how many were drawn in each call."""

    def __init__(self) -> None:
        self.base, self.size_bytes, self.granularity_bytes = 0, EXTENTS * SIZE, SIZE
        self.mapped: list[int] = []
        self.drawn: list[int] = []

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        if descriptor == BAD:
            raise SwiftCacheError("it is no extent")
        self.mapped.append(offset // SIZE)

    def map_each(self, requests: Iterable[MapRequest]) -> MapOutcome:
        self.drawn.append(0)

        def counted() -> Iterable[MapRequest]:
            for request in requests:
                self.drawn[-1] += 1
                yield request

        return super().map_each(counted())

    def unmap(self, offset: int, size_bytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class OpensAtTheEnd(Range):
    """As on a GPU, where access is given last, and may be refused to what is mapped."""

    def map_each(self, requests: Iterable[MapRequest]) -> MapOutcome:
        drawn = list(requests)
        return MapOutcome(len(drawn) - 2, SwiftCacheError("no access"))


def lent(addresses: Range, slice_s: float) -> LentExtents:
    return LentExtents(addresses, 0, SIZE, EXTENTS, slice_s)


def test_an_offer_is_mapped_in_one_go_if_time_allows() -> None:
    addresses = Range()
    extents = lent(addresses, slice_s=60.0)
    outcomes = list(extents.offer(Offer(grant=1, slots=[3, 1, 2]), [10, 11, 12]))
    assert outcomes == [([3, 1, 2], [], [3, 1, 2])]
    assert addresses.drawn == [3]
    assert extents.held == 3
    assert extents.counts()[LeaseState.LENT] == 3


def test_a_reclaim_between_two_slices_keeps_the_rest_from_being_mapped() -> None:
    addresses = Range()
    extents = lent(addresses, slice_s=1e-9)
    outcomes = extents.offer(Offer(grant=1, slots=[0, 1, 2]), [10, 11, 12])
    assert next(outcomes) == ([0], [], [0])
    answer = extents.reclaim(Reclaim(grant=1, slots=[0, 1], deadline_s=1.0, reason="load"))
    assert (answer.vacate, answer.released) == ([0], [1])
    assert list(outcomes) == [([], [1], []), ([2], [], [2])]
    assert addresses.mapped == [0, 2]
    assert extents.held == 2


def test_what_cannot_be_mapped_is_declined_with_all_after_it() -> None:
    addresses = Range()
    extents = lent(addresses, slice_s=60.0)
    list(extents.offer(Offer(grant=1, slots=[4]), [10]))
    offer = Offer(grant=1, slots=[0, 1, 2, 4, 3])
    assert list(extents.offer(offer, [10, 11, BAD, 13, 14])) == [([0, 1, 4], [2, 3], [0, 1])]
    assert addresses.mapped == [4, 0, 1]
    assert extents.problem == "it is no extent"
    assert extents.held == 3
    assert list(extents.offer(offer, [10, 11, 12, 13, 14])) == [([0, 1, 4], [2, 3], [])]


def test_all_that_was_drawn_and_has_no_access_is_declined() -> None:
    extents = lent(OpensAtTheEnd(), slice_s=60.0)
    outcomes = list(extents.offer(Offer(grant=1, slots=[0, 1, 2, 3]), [10, 11, 12, 13]))
    assert outcomes == [([0, 1], [2, 3], [0, 1])]
    assert extents.held == 2
    assert extents.counts()[LeaseState.LENT] == 2
