"""The receiver's book: messages that come late, twice or in the wrong order map nothing wrong."""

from __future__ import annotations

import pytest

from swiftcache_tier.lease import LeaseLedger, LeaseState


@pytest.fixture
def ledger() -> LeaseLedger:
    return LeaseLedger(4)


def lend(ledger: LeaseLedger, grant: int, slots: list[int]) -> None:
    assert ledger.offer(grant, slots).new == slots
    ledger.mapped(slots)


def test_an_offer_is_mapped_once_and_accepted_again(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0, 1])
    assert ledger.offer(1, [0, 1]) == ([], [0, 1], [])
    assert ledger.held() == [0, 1]


def test_an_offer_that_ended_is_refused_for_ever(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0, 1])
    assert ledger.released([0, 1]) == {1: [0, 1]}
    assert ledger.offer(1, [0, 1]) == ([], [], [0, 1])
    lend(ledger, 2, [0, 1])
    assert ledger.offer(1, [0, 1]) == ([], [], [0, 1])
    assert ledger.held() == [0, 1]


def test_an_offer_of_which_part_has_ended_declines_that_part_alone(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0, 1])
    ledger.released([0])
    assert ledger.offer(1, [0, 1]) == ([], [1], [0])


def test_an_offer_that_is_refused_in_part_stays_refused(ledger: LeaseLedger) -> None:
    lend(ledger, 2, [1])
    assert ledger.offer(1, [0, 1]) == ([], [], [0, 1])
    ledger.released([1])
    assert ledger.offer(1, [0]) == ([], [], [0])


def test_an_offer_that_could_not_be_mapped_stays_declined(ledger: LeaseLedger) -> None:
    assert ledger.offer(1, [0]).new == [0]
    ledger.declined([0])
    assert ledger.offer(1, [0]) == ([], [], [0])
    lend(ledger, 2, [0])


def test_a_reclaim_that_overtakes_its_offer_wins(ledger: LeaseLedger) -> None:
    assert ledger.reclaim(1, [0]) == ([], [0])
    assert ledger.offer(1, [0]) == ([], [], [0])
    lend(ledger, 2, [0])


def test_a_reclaim_comes_twice_and_after_the_end(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0, 1])
    assert ledger.reclaim(1, [0]) == ([0], [])
    assert ledger.reclaim(1, [0]) == ([0], [])
    ledger.released([0])
    assert ledger.reclaim(1, [0]) == ([], [0])
    assert ledger.counts()[LeaseState.LENT] == 1


def test_a_reclaim_of_an_earlier_grant_leaves_the_present_one_alone(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0])
    ledger.released([0])
    lend(ledger, 2, [0])
    assert ledger.reclaim(1, [0]) == ([], [0])
    assert ledger.counts()[LeaseState.LENT] == 1


def test_slots_that_are_not_there_are_passed_over(ledger: LeaseLedger) -> None:
    assert ledger.offer(1, [7]) == ([], [], [])
    assert ledger.reclaim(1, [7, -1]) == ([], [])


def test_what_a_lost_donor_lent_stays_until_it_is_released(ledger: LeaseLedger) -> None:
    lend(ledger, 1, [0, 1])
    ledger.silence()
    assert ledger.counts()[LeaseState.ORPHANED] == 2
    assert ledger.released([0, 1]) == {1: [0, 1]}
    assert ledger.held() == []
