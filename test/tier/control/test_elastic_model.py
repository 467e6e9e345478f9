"""An engine that lends its own pages and two receivers, whose pages are of other sizes.

Decisions, books and block pools are the real ones; sockets, processes and memory are simulated.
Every page and every block in use has a number of its own written all over it, so a byte that has
two owners is seen by one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swiftcache_tier.blocks import BlockPool
from swiftcache_tier.blocks.page_map import PageMap
from swiftcache_tier.blocks.placement import DonorRank, Link
from swiftcache_tier.control.messages import (
    Accept,
    Decline,
    MessageError,
    Offer,
    Ping,
    Reclaim,
    Released,
    ToDonor,
    ToReceiver,
)
from swiftcache_tier.donor.lender import Lender
from swiftcache_tier.donor.parties import Receiver
from swiftcache_tier.extents import AddressRange
from swiftcache_tier.lease import Grant
from swiftcache_tier.receiver.lent import LentExtents
from swiftcache_tier.settings import Settings

WORD = 256  # bytes that one number of the simulated memory stands for
EXTENT_BYTES = 4096
EXTENTS = 5
PAGE_BYTES = 1536  # no divisor: pages lie across the edges of extents
PAGES = EXTENTS * EXTENT_BYTES // PAGE_BYTES
BLOCK_BYTES = (1024, 2560)
SETTINGS = Settings(heartbeat_s=1.0, lost_after_s=5.0, offer_timeout_s=4.0, reclaim_deadline_s=3.0)
QUIET_ROUNDS = 60

numbers = itertools.count(1)


class Range(AddressRange):
    """Where a receiver maps the memory of one engine; only which extents are mapped is kept."""

    def __init__(self) -> None:
        self.base, self.size_bytes = 0, EXTENTS * EXTENT_BYTES
        self.mapped: set[int] = set()

    def map(self, offset: int, descriptor: int, size_bytes: int) -> None:
        assert offset not in self.mapped
        self.mapped.add(offset)

    def unmap(self, offset: int, size_bytes: int) -> None:
        """Neighbours are unmapped in one call."""
        for place in range(offset, offset + size_bytes, EXTENT_BYTES):
            self.mapped.remove(place)

    def close(self) -> None:
        self.mapped.clear()


class Engine:
    """One process that serves: its memory, its pages, its lender."""

    def __init__(self) -> None:
        self.memory = np.zeros(EXTENTS * EXTENT_BYTES // WORD, dtype=np.int64)
        self.pages = PageMap(PAGE_BYTES, PAGES, EXTENT_BYTES)
        self.used: dict[int, int] = {}
        self.lent: set[int] = set()
        self.lender = Lender(EXTENTS, EXTENT_BYTES, SETTINGS, lambda: None, engine=self)

    def take_returned(self, slots: list[int]) -> None:
        assert self.lent.issuperset(slots), "an extent came back that was not lent"
        self.lent.difference_update(slots)
        self.pages.release(slots)
        self.zero(slots)

    def zero(self, slots: list[int]) -> None:
        for slot in slots:
            self.memory[words(slot, EXTENT_BYTES)] = 0

    def free(self) -> np.ndarray:
        mask = np.ones(PAGES, dtype=bool)
        mask[[0, *self.used]] = False
        mask[self.pages.held] = False
        return mask

    def lend(self, extents: int, now_s: float) -> None:
        slots = self.pages.wholly_free(self.free(), self.lent)[:extents].tolist()
        self.pages.hold(slots)
        self.lent.update(slots)
        self.zero(slots)
        self.lender.lend(slots, len(self.lent), now_s)

    def use(self, pages: int) -> None:
        for page in np.flatnonzero(self.free())[:pages].tolist():
            self.used[page] = next(numbers)
            self.memory[words(page, PAGE_BYTES)] = self.used[page]

    def check(self) -> None:
        for page, number in self.used.items():
            assert np.all(self.memory[words(page, PAGE_BYTES)] == number), "written by another"
        held = set(self.pages.held.tolist())
        assert not held.intersection(self.used)
        assert np.count_nonzero(self.free()) + len(held) + len(self.used) + 1 == PAGES
        table = self.lender.table
        assert table.kept == EXTENTS - len(self.lent)


@dataclass(eq=False)
class Session:
    """One receiver process and one engine, and what is on the way between them."""

    engine: Engine
    token: str
    receiver: int
    range: Range = field(default_factory=Range)
    blocks: dict[int, int] = field(default_factory=dict)
    retiring: set[int] = field(default_factory=set)
    to_donor: list[ToDonor] = field(default_factory=list)
    to_receiver: list[ToReceiver] = field(default_factory=list)
    offers: list[Offer] = field(default_factory=list)
    ended: bool = False

    def __post_init__(self) -> None:
        self.pool = BlockPool(BLOCK_BYTES[self.receiver])
        self.pool.add_donor(1, 0, EXTENT_BYTES, EXTENTS, DonorRank(Link.HOST, 1.0))
        self.lent = LentExtents(self.range, 0, EXTENT_BYTES, EXTENTS, slice_s=1.0)

    # -- as the donor's port

    def offer(self, grant: Grant) -> None:
        self.offers.append(Offer(grant=grant.number, slots=list(grant.slots)))

    def tell(self, message: ToReceiver) -> None:
        self.to_receiver.append(message)

    def close(self) -> None:
        pass

    # -- as the receiver

    def take_offer(self) -> None:
        offer = self.offers.pop(0)
        for outcome in self.lent.offer(offer, offer.slots):
            self.pool.map_slots(1, outcome.mapped)
            for kind, slots in ((Accept, outcome.accept), (Decline, outcome.decline)):
                if slots:
                    self.to_donor.append(kind(self.token, offer.grant, slots))

    def take_message(self) -> None:
        message = self.to_receiver.pop(0)
        if isinstance(message, Reclaim):
            answer = self.lent.reclaim(message)
            self.retire(answer.vacate)
            if answer.released:
                self.to_donor.append(Released(self.token, message.grant, answer.released))

    def retire(self, slots: list[int]) -> None:
        self.pool.retire_slots(1, slots)
        self.retiring.update(slots)

    def vacate(self) -> None:
        doomed = self.pool.retiring_in_use()
        for block in doomed.tolist():
            # Its other half may lie in an extent that stays, and is to be used again.
            self.engine.memory[words(block, BLOCK_BYTES[self.receiver])] = 0
            del self.blocks[block]
        self.pool.free(doomed)
        slots = sorted(self.retiring)
        self.pool.unmap_slots(1, slots)
        self.retiring.clear()
        self.lent.release(slots)
        while unmapped := self.lent.unmap_some():
            for grant, released in unmapped.items():
                self.to_donor.append(Released(self.token, grant, released))

    def use(self, blocks: int) -> None:
        taken = self.pool.alloc(min(blocks, self.pool.counts().free))
        assert taken is not None
        for block in taken.tolist():
            place = words(block, BLOCK_BYTES[self.receiver])
            assert not self.engine.memory[place].any(), "lent memory is not zero, or used"
            self.blocks[block] = next(numbers)
            self.engine.memory[place] = self.blocks[block]

    def free(self, blocks: int) -> None:
        for block in sorted(self.blocks)[:blocks]:
            self.engine.memory[words(block, BLOCK_BYTES[self.receiver])] = 0
            self.pool.free(np.array([block]))
            del self.blocks[block]

    def mapped_slots(self) -> list[int]:
        return sorted(offset // EXTENT_BYTES for offset in self.range.mapped)

    def check(self) -> None:
        self.pool.check()
        for block, number in self.blocks.items():
            place = words(block, BLOCK_BYTES[self.receiver])
            assert np.all(self.engine.memory[place] == number), "written by another"


def words(index: int, size_bytes: int) -> slice:
    return slice(index * size_bytes // WORD, (index + 1) * size_bytes // WORD)


picks = st.integers(0, 2**16)
few = st.integers(1, EXTENTS)


class Elastic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.tokens = itertools.count()
        self.engine = Engine()
        self.sessions: list[Session] = []
        self.ends_unseen: list[Session] = []

    def pick(self, place: int) -> Iterator[Session]:
        if self.sessions:
            yield self.sessions[place % len(self.sessions)]

    def runs(self, session: Session) -> bool:
        """Whether the engine that it borrows from still does."""
        return session.engine is self.engine

    @rule(receiver=st.integers(0, len(BLOCK_BYTES) - 1))
    def join(self, receiver: int) -> None:
        if any(s.receiver == receiver and self.runs(s) for s in self.sessions):
            return
        session = Session(self.engine, f"session-{next(self.tokens)}", receiver)
        with contextlib.suppress(MessageError):
            self.engine.lender.join(
                Receiver(session.token, f"r{receiver}", receiver, 0, session, self.now_s)
            )
            self.sessions.append(session)

    @initialize()
    def all_join(self) -> None:
        for receiver in range(len(BLOCK_BYTES)):
            self.join(receiver)

    @rule(places=st.lists(picks, min_size=1, max_size=3), extents=few, blocks=st.integers(0, 8))
    def a_good_moment(self, places: list[int], extents: int, blocks: int) -> None:
        """Receivers ask, the engine lends what it can, and what was lent is used at once."""
        for session in [s for place in places for s in self.pick(place)]:
            session.to_donor.append(Ping(session.token, EXTENTS))
            self.exchange(session)
            in_use = set(self.engine.used)
            self.engine.use(PAGES)  # serves requests, which leave their bytes behind
            self.engine_frees_pages(sorted(set(self.engine.used) - in_use))
            self.engine.lend(min(extents, self.engine.lender.demand), self.now_s)
            self.exchange(session)
            session.use(blocks)

    @rule(
        aim=st.integers(0, EXTENTS),
        late=st.sampled_from([0, 0, 5]),
        place=picks,
        pages=st.integers(1, PAGES),
    )
    def a_busy_moment(self, aim: int, late: int, place: int, pages: int) -> None:
        """The engine asks back, gets what one receiver has, in time or late, and uses it."""
        self.engine.lender.aim(min(aim, len(self.engine.lent)), self.now_s)
        for _ in range(late):
            for session in self.sessions:
                session.to_donor.append(Ping(session.token, EXTENTS))
                self.exchange(session)
            self.tick()
        for session in self.pick(place):
            self.exchange(session)
            session.vacate()
            self.exchange(session)
        self.engine.use(pages)

    @rule(place=picks, wanted=st.integers(0, EXTENTS))
    def ping(self, place: int, wanted: int) -> None:
        for session in self.pick(place):
            session.to_donor.append(Ping(session.token, wanted))

    @rule(extents=few)
    def engine_lends(self, extents: int) -> None:
        """Also what nobody wants, which comes back."""
        self.engine.lend(extents, self.now_s)

    @rule(aim=st.integers(0, EXTENTS))
    def engine_asks_back(self, aim: int) -> None:
        self.engine.lender.aim(min(aim, len(self.engine.lent)), self.now_s)

    @rule(pages=st.integers(1, PAGES))
    def engine_uses_pages(self, pages: int) -> None:
        self.engine.use(pages)

    @rule(pages=st.lists(st.integers(1, PAGES), min_size=1))
    def some_requests_end(self, pages: list[int]) -> None:
        self.engine_frees_pages(pages)

    def engine_frees_pages(self, pages: list[int]) -> None:
        for page in pages:
            self.engine.used.pop(page, None)

    @rule(place=picks, blocks=st.integers(1, 8))
    def receiver_uses_blocks(self, place: int, blocks: int) -> None:
        for session in self.pick(place):
            session.use(blocks)

    @rule(place=picks, blocks=st.integers(1, 8))
    def receiver_frees_blocks(self, place: int, blocks: int) -> None:
        for session in self.pick(place):
            session.free(blocks)

    @rule(place=picks)
    def receiver_vacates(self, place: int) -> None:
        for session in self.pick(place):
            session.vacate()

    @rule(place=picks)
    def messages_arrive(self, place: int) -> None:
        for session in self.pick(place):
            self.exchange(session)

    @rule(place=picks, to_donor=st.booleans())
    def a_message_is_lost(self, place: int, to_donor: bool) -> None:
        for session in self.pick(place):
            messages: list[Any] = session.to_donor if to_donor else session.to_receiver
            if messages:
                messages.pop(0)

    @rule(heartbeats=st.integers(1, 6))
    def time_passes(self, heartbeats: int) -> None:
        for _ in range(heartbeats):
            self.tick()

    @rule(place=picks, rarely=st.integers(0, 4))
    def receiver_crashes(self, place: int, rarely: int) -> None:
        for session in self.pick(place) if rarely == 0 else ():
            session.range.close()
            session.ended = True
            self.sessions.remove(session)
            self.ends_unseen.append(session)

    @rule()
    def engine_sees_the_ends(self) -> None:
        for session in self.ends_unseen:
            if self.runs(session):
                self.engine.lender.gone(session.token, self.now_s)
        self.ends_unseen.clear()

    @rule(rarely=st.integers(0, 8))
    def engine_crashes_and_restarts(self, rarely: int) -> None:
        """What it had lent lives on with those who have it, and is vacated in their time."""
        if rarely == 0:
            self.engine = Engine()
            for session in self.sessions:
                session.lent.lose()
                session.retire([s for s in session.mapped_slots() if s not in session.retiring])

    def exchange(self, session: Session) -> None:
        while session.to_donor:
            message = session.to_donor.pop(0)
            if self.runs(session):
                with contextlib.suppress(MessageError):
                    answer = self.engine.lender.hear(message, self.now_s)
                    if answer is not None:
                        session.to_receiver.append(answer)
        while self.runs(session) and session.offers:
            session.take_offer()
        while self.runs(session) and session.to_receiver:
            session.take_message()

    def tick(self) -> None:
        self.now_s += SETTINGS.heartbeat_s
        self.engine.lender.tick(self.now_s)

    @invariant()
    def every_byte_has_one_owner(self) -> None:
        self.engine.check()
        for session in self.sessions:
            session.check()
        mapped = [o for s in self.sessions if self.runs(s) for o in s.range.mapped]
        assert len(mapped) == len(set(mapped)), "an extent is mapped by two"
        assert {offset // EXTENT_BYTES for offset in mapped} <= self.engine.lent

    def teardown(self) -> None:
        """Once nobody crashes any more and the engine wants all, all comes home."""
        self.engine_sees_the_ends()
        for _ in range(QUIET_ROUNDS):
            self.engine.lender.aim(0, self.now_s)
            for session in self.sessions:
                session.to_donor.append(Ping(session.token, 0))
                self.exchange(session)
                session.vacate()
                self.exchange(session)
            self.tick()
            self.every_byte_has_one_owner()
            if not self.engine.lent:
                break
        assert not self.engine.lent, self.engine.lender.table.counts()
        self.engine.use(PAGES)
        assert len(self.engine.used) == PAGES - 1, "pages are lost"
        assert not any(s.blocks for s in self.sessions if self.runs(s))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


TestElastic = Elastic.TestCase
TestElastic.settings = hypothesis_settings(max_examples=150, stateful_step_count=50, deadline=None)
