"""The transition table, and the donor's book that is kept by it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.lease import TRANSITIONS, LeaseEvent, LeaseState, LeaseTable, next_state

LEAVES_FREE = {LeaseEvent.OFFER}
ENDS = {LeaseEvent.DECLINE, LeaseEvent.RELEASE, LeaseEvent.GONE}


def test_only_the_holder_or_its_end_makes_an_extent_free() -> None:
    ways = {event for (_, event), state in TRANSITIONS.items() if state is LeaseState.FREE}
    assert ways == ENDS


def test_a_held_extent_is_never_offered_again() -> None:
    assert [state for state, event in TRANSITIONS if event is LeaseEvent.OFFER] == [LeaseState.FREE]


def test_every_held_state_ends_with_the_holder() -> None:
    for state in set(LeaseState) - {LeaseState.FREE}:
        assert next_state(state, LeaseEvent.GONE) is LeaseState.FREE
        assert next_state(state, LeaseEvent.RELEASE) is LeaseState.FREE


@given(st.sampled_from(LeaseState), st.sampled_from(sorted(set(LeaseEvent))))
def test_an_event_that_comes_twice_is_as_one(state: LeaseState, event: LeaseEvent) -> None:
    once = next_state(state, event)
    assert next_state(once, event) is once


def test_an_extent_is_dirty_until_it_is_scrubbed() -> None:
    table = LeaseTable(2)
    grant = table.offer("a", 2, 0.0)
    assert grant is not None
    assert table.offer("b", 1, 0.0) is None
    assert sorted(table.apply(LeaseEvent.DECLINE, "a", grant.number, grant.slots, 0.0)) == [0, 1]
    assert table.dirty == {0, 1}
    assert table.offer("b", 1, 0.0) is None
    table.scrubbed(1)
    second = table.offer("b", 2, 0.0)
    assert second is not None
    assert second.slots == (1,)
    assert second.number > grant.number


def test_what_does_not_match_the_lease_changes_nothing() -> None:
    table = LeaseTable(2)
    grant = table.offer("a", 1, 0.0)
    assert grant is not None
    before = table.counts()
    for receiver, number, slots in [
        ("b", grant.number, (0,)),
        ("a", grant.number + 1, (0,)),
        ("a", grant.number, (1,)),
        ("a", grant.number, (-1, 2, 2**40)),
    ]:
        assert table.apply(LeaseEvent.RELEASE, receiver, number, slots, 0.0) == []
        assert table.apply(LeaseEvent.ACCEPT, receiver, number, slots, 0.0) == []
    assert table.counts() == before


def test_reclaim_takes_lent_extents_only_and_names_their_grants() -> None:
    table = LeaseTable(4)
    first, second = table.offer("a", 2, 0.0), table.offer("a", 2, 1.0)
    assert first is not None
    assert second is not None
    table.apply(LeaseEvent.ACCEPT, "a", second.number, second.slots, 2.0)
    assert sorted(table.reclaim("a", 4, 3.0)) == [2, 3]
    assert table.reclaiming("a") == {second.number: [2, 3]}
    assert table.asked_since_s("a") == 3.0
    assert table.counts_of("a")[LeaseState.OFFERED] == 2


def test_an_offer_is_withdrawn_after_its_time() -> None:
    table = LeaseTable(2)
    old, young = table.offer("a", 1, 0.0), table.offer("a", 1, 5.0)
    assert old is not None
    assert young is not None
    assert table.withdraw_offers("a", 4.0, 6.0) == list(old.slots)
    assert table.state(old.slots[0]) is LeaseState.RECLAIMING
    assert table.is_offered(young)
    assert not table.is_offered(old)


def test_silence_orphans_and_a_sign_of_life_brings_back() -> None:
    table = LeaseTable(3)
    grant = table.offer("a", 2, 0.0)
    assert grant is not None
    table.apply(LeaseEvent.ACCEPT, "a", grant.number, grant.slots, 0.0)
    table.reclaim("a", 1, 0.0)
    assert table.apply_to_all(LeaseEvent.SILENCE, "a", 1.0) == []
    assert table.counts()[LeaseState.ORPHANED] == 2
    table.apply_to_all(LeaseEvent.RESUME, "a", 2.0)
    assert table.counts_of("a")[LeaseState.LENT] == 2
    assert table.apply(LeaseEvent.DECLINE, "a", grant.number, [0], 3.0) == [0]
    assert table.apply_to_all(LeaseEvent.GONE, "a", 3.0) == [1]
    assert table.counts()[LeaseState.FREE] == 3
