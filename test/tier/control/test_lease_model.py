"""Two receivers and three donors over a network that delays, repeats, reorders and loses.

The donors' decisions and books, and the receivers' ledgers, are the real ones; sockets, processes
and memory are simulated. A piece of memory is one object: what a descriptor leads to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftcache_tier.control.messages import (
    Accept,
    Bye,
    Decline,
    Error,
    ErrorCode,
    Farewell,
    MessageError,
    Offer,
    Ping,
    Reclaim,
    Released,
    ToDonor,
    ToReceiver,
)
from swiftcache_tier.donor.lender import Lender, Receiver
from swiftcache_tier.extents import AddressRange
from swiftcache_tier.lease import Grant, LeaseState
from swiftcache_tier.receiver.lent import LentExtents
from swiftcache_tier.settings import Settings

DONORS = 3
RECEIVERS = 2
EXTENTS = 4
EXTENT_BYTES = 4096
SETTINGS = Settings(
    heartbeat_s=1.0,
    lost_after_s=5.0,
    offer_timeout_s=4.0,
    reclaim_deadline_s=3.0,
    extents_per_message=3,
)
# A run of the machine that never ends would be a lease that never ends.
QUIET_ROUNDS = 100


@dataclass(eq=False)
class Memory:
    """What a descriptor leads to."""

    clean: bool = True


class SimulatedRange(AddressRange):
    """Maps `Memory` by its place in a list."""

    def __init__(self, everything: list[Memory]) -> None:
        self.base, self.size_bytes = 0, EXTENTS * EXTENT_BYTES
        self.mapped: dict[int, Memory] = {}
        self._everything = everything

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        assert offset not in self.mapped
        self.mapped[offset] = self._everything[descriptor]

    def unmap(self, offset: int, size_bytes: int) -> None:
        for piece in range(offset, offset + size_bytes, EXTENT_BYTES):
            del self.mapped[piece]

    def close(self) -> None:
        self.mapped.clear()


@dataclass(eq=False)
class Session:
    """Both ends of one session, and what is on the way between them."""

    world: World
    donor: Donor
    token: str
    receiver: int
    process: int
    range: SimulatedRange
    lent: LentExtents
    to_vacate: set[int] = field(default_factory=set)
    to_donor: list[ToDonor] = field(default_factory=list)
    to_receiver: list[ToReceiver] = field(default_factory=list)
    offers: list[tuple[Offer, list[int]]] = field(default_factory=list)
    heard: list[ToDonor] = field(default_factory=list)
    """All that has reached the donor, to come again."""
    taking: Iterator[None] | None = None
    """An offer that is being mapped, piece by piece."""
    offered: list[tuple[Offer, list[int]]] = field(default_factory=list)
    """All offers that were made, to come again."""
    lost: bool = False
    """The receiver has given the donor up."""
    over: bool = False
    """Both sides are done with it."""

    # -- as the donor's port ------------------------------------------------------------------

    def offer(self, grant: Grant) -> None:
        pieces = [self.donor.memory[slot] for slot in grant.slots]
        assert all(piece.clean for piece in pieces), "offered without a scrub"
        places = [self.world.everything.index(piece) for piece in pieces]
        self.offers.append((Offer(grant=grant.number, slots=list(grant.slots)), places))
        self.offered.append(self.offers[-1])

    def tell(self, message: ToReceiver) -> None:
        self.to_receiver.append(message)

    def close(self) -> None:
        pass

    # -- as the receiver ----------------------------------------------------------------------

    def alive(self) -> bool:
        return self.world.processes[self.receiver] == self.process

    def take_offer(self, offer: Offer, places: list[int]) -> None:
        if self.lost:
            return  # the connection is closed
        self.finish_offer()
        self.taking = self.pieces(offer, places)
        next(self.taking)

    def pieces(self, offer: Offer, places: list[int]) -> Iterator[None]:
        for outcome in self.lent.offer(offer, places):
            for slot in outcome.mapped:
                self.range.mapped[slot * EXTENT_BYTES].clean = False
            if outcome.accept:
                self.to_donor.append(Accept(self.token, offer.grant, outcome.accept))
            if outcome.decline:
                self.to_donor.append(Decline(self.token, offer.grant, outcome.decline))
            yield

    def finish_offer(self) -> None:
        for _ in self.taking or ():
            pass
        self.taking = None

    def take(self, message: ToReceiver) -> None:
        match message:
            case Reclaim():
                if self.lost:
                    return
                answer = self.lent.reclaim(message)
                self.to_vacate.update(answer.vacate)
                if answer.released:
                    self.to_donor.append(Released(self.token, message.grant, answer.released))
            case Farewell() | Error(code=ErrorCode.NO_SESSION):
                self.give_up()
                if not self.range.mapped:
                    self.over = True

    def vacate(self, slots: set[int]) -> None:
        self.to_vacate -= slots
        self.lent.release(slots)
        while unmapped := self.lent.unmap_some():
            for grant, released in unmapped.items():
                self.to_donor.append(Released(self.token, grant, released))

    def give_up(self) -> None:
        """Everything is to be vacated, then the donor is told."""
        if not self.lost:
            self.lost = True
            self.taking = None
            self.lent.lose()
            self.to_vacate = {offset // EXTENT_BYTES for offset in self.range.mapped}

    def say_bye(self) -> None:
        if self.alive() and self.lost and not self.range.mapped and not self.over:
            self.to_donor.append(Bye(self.token))

    def exchange(self, vacate: bool) -> None:
        """All that is on the way arrives, in order."""
        while self.to_donor:
            self.world.hear(self, self.to_donor.pop(0))
        while self.alive() and not self.over and (self.offers or self.to_receiver):
            if self.offers:
                self.take_offer(*self.offers.pop(0))
                self.finish_offer()
            else:
                self.take(self.to_receiver.pop(0))
        if vacate and self.alive():
            self.vacate(set(self.to_vacate))
        while self.to_donor:
            self.world.hear(self, self.to_donor.pop(0))


class Donor:
    """One donor process: its lender and its memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.running = True
        self.lender = Lender(EXTENTS, EXTENT_BYTES, SETTINGS, dirtied=lambda: None)
        self.memory = [world.new_memory() for _ in range(EXTENTS)]

    def scrub(self, slots: list[int]) -> None:
        for slot in slots:
            self.memory[slot] = self.world.new_memory()
        self.lender.scrubbed(slots, self.world.now_s)


class World:
    """Donors, receivers, sessions, time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.everything: list[Memory] = []
        self.tokens = itertools.count()
        self.donors = [Donor(self) for _ in range(DONORS)]
        self.processes = [0] * RECEIVERS
        """Number of the present process of each receiver."""
        self.sessions: list[Session] = []
        self.ends_unseen: list[Session] = []
        """Sessions of ended processes, which their donors have not noticed."""

    def new_memory(self) -> Memory:
        self.everything.append(Memory())
        return self.everything[-1]

    def join(self, receiver: int, donor: Donor) -> None:
        token = f"session-{next(self.tokens)}"
        memory = SimulatedRange(self.everything)
        session = Session(
            world=self,
            donor=donor,
            token=token,
            receiver=receiver,
            process=self.processes[receiver],
            range=memory,
            lent=LentExtents(memory, 0, EXTENT_BYTES, EXTENTS, slice_s=0.0),
        )
        with contextlib.suppress(MessageError):  # it is draining
            donor.lender.join(
                Receiver(
                    token=token,
                    name=f"receiver {receiver}",
                    pid=receiver * 1000 + session.process,
                    uid=0,
                    port=session,
                    heard_s=self.now_s,
                )
            )
            self.sessions.append(session)

    def live(self) -> list[Session]:
        """Sessions that a running receiver still has."""
        return [s for s in self.sessions if s.alive() and not s.over]

    def hear(self, session: Session, message: ToDonor) -> None:
        """Deliver to the donor, if it runs."""
        if not session.donor.running:
            return
        session.heard.append(message)
        try:
            answer = session.donor.lender.hear(message, self.now_s)
        except MessageError as error:
            answer = Error(code=error.code, message=str(error))
        if answer is not None:
            session.to_receiver.append(answer)

    def end_process(self, receiver: int) -> None:
        for session in self.sessions:
            if session.receiver == receiver and session.alive():
                session.range.close()
                self.ends_unseen.append(session)
        self.processes[receiver] += 1

    def see_end(self, session: Session) -> None:
        self.ends_unseen.remove(session)
        if session.donor.running:
            session.donor.lender.gone(session.token, self.now_s)

    def tick(self) -> None:
        self.now_s += SETTINGS.heartbeat_s
        for donor in self.donors:
            if donor.running:
                donor.lender.tick(self.now_s)


picks = st.integers(0, 2**16)


class Leases(RuleBasedStateMachine):
    """Rules pick among what there is, so that most steps do something."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    def pick(self, things: list[Any], place: int) -> Iterator[Any]:
        if things:
            yield things[place % len(things)]

    @rule(receiver=st.integers(0, RECEIVERS - 1), donor=st.integers(0, DONORS - 1))
    def join(self, receiver: int, donor: int) -> None:
        taken = [
            s
            for s in self.world.live()
            if s.receiver == receiver and s.donor is self.world.donors[donor]
        ]
        if not taken:
            self.world.join(receiver, self.world.donors[donor])

    @initialize()
    def all_join(self) -> None:
        for receiver, donor in itertools.product(range(RECEIVERS), self.world.donors):
            self.world.join(receiver, donor)

    @rule(place=picks, wanted=st.integers(0, EXTENTS))
    def ping(self, place: int, wanted: int) -> None:
        for session in self.pick([s for s in self.world.live() if not s.lost], place):
            session.to_donor.append(Ping(session.token, wanted))

    @rule(place=picks, wanted=st.integers(0, EXTENTS))
    def ping_at_once(self, place: int, wanted: int) -> None:
        for session in self.pick([s for s in self.world.live() if not s.lost], place):
            self.world.hear(session, Ping(session.token, wanted))

    @rule(places=st.lists(picks, min_size=1, max_size=4), vacate=st.booleans(), say=st.booleans())
    def a_good_moment(self, places: list[int], vacate: bool, say: bool) -> None:
        """Everything that is on the way to and from some receivers arrives."""
        for place in places:
            for session in self.pick(self.world.live(), place):
                if not session.lost:
                    session.to_donor.append(Ping(session.token, EXTENTS))
                session.exchange(vacate)
                if say:
                    session.say_bye()

    @rule()
    def scrub_all(self) -> None:
        for donor in self.world.donors:
            donor.scrub(sorted(donor.lender.table.dirty))

    @rule(place=picks, which=picks, keep=st.booleans())
    def deliver_to_donor(self, place: int, which: int, keep: bool) -> None:
        for session in self.pick([s for s in self.world.sessions if s.to_donor], place):
            which %= len(session.to_donor)
            message = session.to_donor[which] if keep else session.to_donor.pop(which)
            self.world.hear(session, message)

    @rule(place=picks, which=picks, keep=st.booleans())
    def deliver_to_receiver(self, place: int, which: int, keep: bool) -> None:
        for session in self.pick([s for s in self.world.live() if s.to_receiver], place):
            which %= len(session.to_receiver)
            message = session.to_receiver[which] if keep else session.to_receiver.pop(which)
            session.take(message)

    @rule(place=picks, which=picks, keep=st.booleans())
    def deliver_offer(self, place: int, which: int, keep: bool) -> None:
        for session in self.pick([s for s in self.world.live() if s.offers], place):
            which %= len(session.offers)
            session.take_offer(*(session.offers[which] if keep else session.offers.pop(which)))

    @rule(place=picks)
    def an_offer_is_mapped_further(self, place: int) -> None:
        for session in self.pick([s for s in self.world.live() if s.taking], place):
            next(session.taking, None)

    @rule(place=picks, which=picks)
    def an_old_message_comes_again(self, place: int, which: int) -> None:
        for session in self.pick([s for s in self.world.sessions if s.heard], place):
            self.world.hear(session, session.heard[which % len(session.heard)])

    @rule(place=picks, which=picks)
    def an_old_offer_comes_again(self, place: int, which: int) -> None:
        for session in self.pick([s for s in self.world.live() if s.offered], place):
            session.take_offer(*session.offered[which % len(session.offered)])

    @rule(place=picks, which=picks, way=st.sampled_from(["to_donor", "to_receiver", "offers"]))
    def lose(self, place: int, which: int, way: str) -> None:
        for session in self.pick([s for s in self.world.sessions if getattr(s, way)], place):
            getattr(session, way).pop(which % len(getattr(session, way)))

    @rule(place=picks, slots=st.sets(st.integers(0, EXTENTS - 1), min_size=1))
    def vacate(self, place: int, slots: set[int]) -> None:
        for session in self.pick([s for s in self.world.live() if s.to_vacate], place):
            session.vacate(slots & session.to_vacate)

    @rule(place=picks, rarely=st.integers(0, 3))
    def give_up(self, place: int, rarely: int) -> None:
        for session in self.pick(self.world.live() if rarely == 0 else [], place):
            session.give_up()

    @rule(place=picks)
    def say_bye(self, place: int) -> None:
        for session in self.pick(self.world.live(), place):
            session.say_bye()

    @rule(donor=st.integers(0, DONORS - 1), most=st.integers(1, EXTENTS))
    def scrub(self, donor: int, most: int) -> None:
        dirty = sorted(self.world.donors[donor].lender.table.dirty)
        self.world.donors[donor].scrub(dirty[:most])

    @rule(heartbeats=st.integers(1, 7))
    def time_passes(self, heartbeats: int) -> None:
        for _ in range(heartbeats):
            self.world.tick()

    @rule(receiver=st.integers(0, 5 * RECEIVERS))
    def receiver_crashes(self, receiver: int) -> None:
        if receiver < RECEIVERS:  # not often, or little else would happen
            self.world.end_process(receiver)

    @precondition(lambda self: self.world.ends_unseen)
    @rule(place=picks)
    def donor_sees_the_end(self, place: int) -> None:
        for session in self.pick(self.world.ends_unseen, place):
            self.world.see_end(session)

    @rule(place=picks, rarely=st.integers(0, 5))
    def connection_breaks(self, place: int, rarely: int) -> None:
        for session in self.pick(self.world.live() if rarely == 0 else [], place):
            if session.donor.running:
                session.donor.lender.door_closed(session.token, self.world.now_s)

    @rule(donor=st.integers(0, 5 * DONORS))
    def donor_drains(self, donor: int) -> None:
        if donor < DONORS:
            self.world.donors[donor].lender.drain(self.world.now_s)

    @rule(donor=st.integers(0, 5 * DONORS))
    def donor_crashes_and_restarts(self, donor: int) -> None:
        if donor < DONORS:
            self.world.donors[donor].running = False
            self.world.donors[donor] = Donor(self.world)

    @invariant()
    def no_memory_has_two_owners(self) -> None:
        mapped = [piece for s in self.world.live() for piece in s.range.mapped.values()]
        assert len(mapped) == len({id(piece) for piece in mapped})

    @invariant()
    def what_is_mapped_is_lent_to_its_holder(self) -> None:
        for session in self.world.live():
            if not session.donor.running:
                continue
            table = session.donor.lender.table
            for offset, piece in session.range.mapped.items():
                slot = offset // EXTENT_BYTES
                assert table.holder(slot) == session.token
                assert table.state(slot) is not LeaseState.FREE
                assert session.donor.memory[slot] is piece

    @invariant()
    def books_add_up(self) -> None:
        for donor in self.world.donors:
            table = donor.lender.table
            states = [table.state(slot) for slot in range(EXTENTS)]
            assert table.counts() == {state: states.count(state) for state in LeaseState}
            assert all(table.state(slot) is LeaseState.FREE for slot in table.dirty)
        for session in self.world.live():
            assert session.lent.held == len(session.range.mapped)

    def teardown(self) -> None:
        """Once nothing is lost any more and everyone leaves, every lease ends."""
        world = self.world
        for donor in world.donors:
            donor.lender.drain(world.now_s)
        for _ in range(QUIET_ROUNDS):
            for session in list(world.ends_unseen):
                world.see_end(session)
            for session in world.sessions:
                if session.alive() and not session.lost:
                    session.to_donor.append(Ping(session.token, EXTENTS))
                session.exchange(vacate=True)
                session.say_bye()
            for donor in world.donors:
                donor.scrub(sorted(donor.lender.table.dirty))
            world.tick()
            if all(donor.lender.idle for donor in world.donors):
                break
        for donor in world.donors:
            table = donor.lender.table
            assert donor.lender.idle, table.counts()
            grant = table.offer("next", EXTENTS, world.now_s)
            assert grant is not None
            assert sorted(grant.slots) == list(range(EXTENTS))
        assert not any(s.range.mapped for s in world.live() if s.donor.running)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


TestLeases = Leases.TestCase
TestLeases.settings = hypothesis_settings(max_examples=200, stateful_step_count=60, deadline=None)
