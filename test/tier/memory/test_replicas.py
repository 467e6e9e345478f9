"""Copies of blocks: never two on one donor, never lost, freed with their block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftcache_tier.blocks import NONE, BlockPool, DonorRank, Link, Replicas
from swiftcache_tier.blocks.placement import fits

BLOCK = 64
SPACING = 1 << 12


def pool_of(*sizes: int) -> BlockPool:
    """Donor i has so many blocks, all free; each is an extent of its own."""
    pool = BlockPool(BLOCK)
    for key, blocks in enumerate(sizes):
        pool.add_donor(key, key * SPACING, BLOCK, blocks, DonorRank(Link.HOST, 20.0))
        pool.map_slots(key, range(blocks))
    return pool


def taken(pool: BlockPool, replicas: Replicas, blocks: int) -> np.ndarray:
    ids = pool.alloc(blocks)
    assert ids is not None
    replicas.place(ids)
    return ids


@pytest.mark.parametrize("sizes", [(8, 8), (8, 4, 4), (5, 5, 5)])
def test_what_fits_twice_is_placed_twice_on_different_donors(sizes: tuple[int, ...]) -> None:
    pool = pool_of(*sizes)
    replicas = Replicas(pool, 2)
    blocks = sum(sizes) // 2
    assert pool.has_room(blocks, 2)
    assert not pool.has_room(blocks + 1, 2)
    ids = taken(pool, replicas, blocks)
    copies = replicas.of(ids)[:, 0]
    assert replicas.short == 0
    assert np.all(copies != NONE)
    assert np.all(pool.donor_of(ids) != pool.donor_of(copies))


def test_one_donor_keeps_blocks_without_copies_until_another_comes() -> None:
    pool = pool_of(4)
    replicas = Replicas(pool, 3)
    assert pool.has_room(4, 3), "one copy on each donor is all that is asked"
    ids = taken(pool, replicas, 4)
    assert replicas.short == 4
    assert replicas.refill(10, ()).sources.size == 0
    pool.add_donor(7, 7 * SPACING, BLOCK, 3, DonorRank(Link.HOST, 20.0))
    pool.map_slots(7, range(3))
    refill = replicas.refill(10, {int(ids[0])})
    assert refill.sources.tolist() == ids[1:].tolist()
    assert np.all(pool.donor_of(refill.targets) == 7)
    assert replicas.short == 4, "each wants one more still"
    assert replicas.copies == 3


def test_a_lost_copy_is_dropped_and_a_lost_block_becomes_its_copy() -> None:
    pool = pool_of(4, 4)
    replicas = Replicas(pool, 2)
    ids = taken(pool, replicas, 4)
    pool.retire_slots(0, range(4))
    doomed = pool.retiring_in_use()
    dropped = replicas.drop(doomed, keep=())
    lost = ids[np.isin(ids, doomed)]
    assert dropped + lost.size == 4
    copies = replicas.of(lost)[:, 0]
    replicas.promote(lost, copies)
    pool.free(lost)
    assert pool.vacated(0, range(4))
    assert replicas.short == 4
    kept = np.concatenate([np.setdiff1d(ids, lost), copies])
    assert np.all(pool.donor_of(kept) == 1)


@pytest.mark.parametrize(
    ("blocks", "copies", "free", "expected"),
    [
        (2, 2, [2, 2], True),
        (3, 2, [2, 4], False),
        (1, 2, [9], True),
        (4, 3, [9], True),
        (1, 1, [], False),
        (1, 2, [], False),
    ],
)
def test_fits(blocks: int, copies: int, free: list[int], expected: bool) -> None:
    assert fits(blocks, copies, free) is expected


class ReplicaMachine(RuleBasedStateMachine):
    """Blocks are taken and freed, donors are asked for their memory and lend it again."""

    @initialize(
        sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), wanted=st.integers(2, 3)
    )
    def begin(self, sizes: list[int], wanted: int) -> None:
        self.pool, self.wanted, self.sizes = pool_of(*sizes), wanted, sizes
        self.replicas = Replicas(self.pool, wanted)
        self.ids: list[int] = []
        self.away: set[int] = set()

    @rule(blocks=st.integers(0, 8))
    def take(self, blocks: int) -> None:
        ids = self.pool.alloc(blocks)
        if ids is not None:
            self.replicas.place(ids)
            self.ids += ids.tolist()

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.sampled_from(self.ids), unique=True))
        self.ids = [block for block in self.ids if block not in gone]
        self.pool.free(np.array(gone, dtype=np.int64))
        self.replicas.forget(np.array(gone, dtype=np.int64))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, len(self.sizes) - 1))
        if key in self.away:
            return
        self.away.add(key)
        self.pool.retire_slots(key, range(self.sizes[key]))
        doomed = self.pool.retiring_in_use()
        self.replicas.drop(doomed, keep=())
        lost = np.array([b for b in self.ids if b in set(doomed.tolist())], dtype=np.int64)
        copies = self.replicas.of(lost).max(axis=1)
        saved = copies != NONE
        self.replicas.promote(lost[saved], copies[saved])
        self.replicas.forget(lost[~saved])
        self.pool.free(lost)
        self.ids = [b for b in self.ids if b not in lost.tolist()] + copies[saved].tolist()
        assert self.pool.vacated(key, range(self.sizes[key]))
        self.pool.unmap_slots(key, range(self.sizes[key]))

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        if self.away:
            key = data.draw(st.sampled_from(sorted(self.away)))
            self.pool.map_slots(key, range(self.sizes[key]))
            self.away.remove(key)

    @rule(blocks_max=st.integers(1, 9), data=st.data())
    def refill(self, blocks_max: int, data: st.DataObject) -> None:
        keep_out = set(data.draw(st.lists(st.sampled_from(self.ids)))) if self.ids else set()
        free, copies = self.pool.counts().free, self.replicas.copies
        refill = self.replicas.refill(blocks_max, keep_out)
        assert not keep_out & set(refill.sources.tolist())
        assert self.pool.counts().free == free - refill.targets.size
        assert self.replicas.copies == copies + refill.targets.size

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        table = self.replicas.of(np.array(self.ids, dtype=np.int64))
        everything = self.ids + table[table != NONE].tolist()
        assert sorted(everything) == self.pool.in_use().tolist(), "a block is lost or has two users"
        for block, copies in zip(self.ids, table, strict=True):
            donors = self.pool.donor_of(np.array([block, *copies[copies != NONE]])).tolist()
            assert len(set(donors)) == len(donors), "two copies on one donor"
        short = int(np.count_nonzero((table == NONE).any(axis=1)))
        assert self.replicas.short == short


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
