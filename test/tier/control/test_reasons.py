"""Why a donor asks its memory back: what it tells the receiver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swiftcache_tier.control.messages import Accept, Ping, Reclaim, Released, ToReceiver
from swiftcache_tier.donor.lender import Lender, Receiver
from swiftcache_tier.lease import Grant, LeaseState
from swiftcache_tier.settings import Settings

EXTENTS = 8
SETTINGS = Settings()


class Peer:
    """A receiver that takes all it is offered, and keeps what it is told."""

    def __init__(self, lender: Lender, name: str) -> None:
        self.name = name
        self.grants: list[Grant] = []
        self.reclaims: list[Reclaim] = []
        self._lender = lender
        lender.join(Receiver(name, name, pid=1, uid=0, port=self, heard_s=0.0))

    def offer(self, grant: Grant) -> None:
        self.grants.append(grant)

    def tell(self, message: ToReceiver) -> None:
        assert isinstance(message, Reclaim)
        self.reclaims.append(message)

    def close(self) -> None:
        pass

    def speak(self, now_s: float) -> None:
        self._lender.hear(Ping(self.name, wanted=EXTENTS), now_s)
        while self.grants:
            grant = self.grants.pop()
            self._lender.hear(Accept(self.name, grant.number, list(grant.slots)), now_s)

    def release(self, now_s: float) -> None:
        for message in self.reclaims:
            self._lender.hear(Released(self.name, message.grant, message.slots), now_s)
        self.reclaims.clear()
        self._lender.scrubbed(sorted(self._lender.table.dirty), now_s)

    @property
    def reasons(self) -> set[str]:
        return {message.reason for message in self.reclaims}


class KeptMemory:
    """An engine that does nothing with what it gets back."""

    def take_returned(self, slots: list[int]) -> None:
        pass


def lender_and_peer(engine: KeptMemory | None = None) -> tuple[Lender, Peer]:
    """All extents are lent to the peer."""
    lender = Lender(EXTENTS, 1 << 20, SETTINGS, lambda: None, engine=engine)
    peer = Peer(lender, "one")
    peer.speak(0.0)
    if engine is not None:
        lender.lend(range(EXTENTS), EXTENTS, 0.0)
        peer.speak(0.0)
    return lender, peer


def fall_silent(lender: Lender) -> None:
    """Time passes in which no receiver speaks: until 6.0."""
    for now_s in (0.0, 2.0, 4.0, 6.0):
        lender.tick(now_s)


Change = Callable[[Lender, float], None]

CHANGES: list[tuple[Change, str]] = [
    (lambda lender, now_s: lender.drain(now_s), "the donor is ending"),
    (lambda lender, now_s: lender.drain_for_operator(now_s), "an operator drains the donor"),
    (lambda lender, now_s: lender.limit(None, False, 2, now_s), "an operator has set a limit"),
    (lambda lender, now_s: lender.limit(None, True, 2, now_s), "an operator has set a limit"),
    (lambda lender, now_s: lender.limit("one", False, 2, now_s), "an operator has set a limit"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_it_is_the_same_whether_one_was_silent_or_not(change: Change, reason: str) -> None:
    lender, peer = lender_and_peer()
    change(lender, 0.1)
    assert peer.reasons == {reason}
    lender, peer = lender_and_peer()
    fall_silent(lender)
    change(lender, 7.0)
    assert not peer.reclaims, "it is silent"
    peer.speak(8.0)
    assert peer.reasons == {reason}


def test_the_engine_s_need_is_told_to_one_that_was_silent() -> None:
    lender, peer = lender_and_peer(KeptMemory())
    fall_silent(lender)
    lender.aim(3, 7.0)
    peer.speak(8.0)
    assert peer.reasons == {"the donor needs it for its own requests"}


def test_of_a_limit_and_an_engine_the_tighter_is_named() -> None:
    lender, peer = lender_and_peer(KeptMemory())
    lender.limit(None, False, 6, 0.1)
    assert peer.reasons == {"an operator has set a limit"}
    peer.release(0.2)
    lender.aim(4, 0.3)
    assert peer.reasons == {"the donor needs it for its own requests"}
    peer.release(0.4)
    lender.limit(None, False, 2, 0.5)
    assert peer.reasons == {"an operator has set a limit"}


def test_within_a_limit_it_is_the_other_receiver() -> None:
    lender, peer = lender_and_peer()
    lender.limit(None, False, 4, 0.1)
    peer.release(0.2)
    other = Peer(lender, "other")
    other.speak(0.3)
    assert peer.reasons == {"another receiver asks for its share"}


def test_others_give_back_to_an_engine_in_the_place_of_one_that_does_not() -> None:
    lender = Lender(EXTENTS, 1 << 20, SETTINGS, lambda: None, engine=KeptMemory())
    peers = [Peer(lender, name) for name in ("deaf", "other")]
    for peer in peers:
        peer.speak(0.0)
    lender.lend(range(EXTENTS), EXTENTS, 0.0)
    for peer in peers:
        peer.speak(0.0)
    lender.limit("deaf", False, 1, 0.1)
    for now_s in (0.2, 2.0, 4.0, 6.0):
        for peer in peers:
            peer.speak(now_s)
        lender.tick(now_s)
    assert lender.table.counts()[LeaseState.DEGRADED] == 3
    other = peers[1]
    assert not other.reclaims
    lender.aim(6, 7.0)
    assert other.reasons == {"the donor needs it for its own requests"}
    assert [len(message.slots) for message in other.reclaims] == [2]
    assert lender.table.counts_of("deaf")[LeaseState.LENT] == 1
