"""The block ledger against a model that looks at every block and every slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.raw_memory import run_child
from swiftcache_tier.blocks import BlockCounts, BlockPool, DonorRank, Link, Room, share

NVLINK = DonorRank(Link.NVLINK, 300.0)
HOST = DonorRank(Link.HOST, 50.0)
BLOCK = 24
# Place of each donor that the machine may add: far enough apart for 12 slots of 60 bytes.
SPACING = 30 * BLOCK


@dataclass
class Donor:
    """What the model knows: the sizes, and the state of each slot."""

    key: int
    rank: DonorRank
    extent_bytes: int
    extents: int
    mapped: set[int] = field(default_factory=set)
    retiring: set[int] = field(default_factory=set)

    @property
    def offset_bytes(self) -> int:
        return self.key * SPACING

    def blocks(self) -> set[int]:
        first = self.offset_bytes // BLOCK
        return set(range(first, first + self.extents * self.extent_bytes // BLOCK))

    def slots_of(self, block: int) -> set[int]:
        start = block * BLOCK - self.offset_bytes
        return {byte // self.extent_bytes for byte in range(start, start + BLOCK)}

    def usable(self) -> set[int]:
        return {block for block in self.blocks() if self.slots_of(block) <= self.mapped}

    def touching(self, slots: set[int]) -> set[int]:
        return {block for block in self.blocks() if self.slots_of(block) & slots}


class PoolMachine(RuleBasedStateMachine):
    """Donors come and go, slots are mapped, retired and unmapped, blocks allocated and freed."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCK)
        self.donors: dict[int, Donor] = {}
        self.in_use: set[int] = set()

    def some_donor(self, data: st.DataObject) -> Donor:
        return self.donors[data.draw(st.sampled_from(sorted(self.donors)), label="donor")]

    def some_of(self, data: st.DataObject, slots: set[int]) -> list[int]:
        if not slots:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True), label="slots")

    @precondition(lambda self: len(self.donors) < 5)
    @rule(
        data=st.data(),
        rank=st.sampled_from([NVLINK, DonorRank(Link.NVLINK, 100.0), HOST]),
        extent_bytes=st.integers(5, 60),
        extents=st.integers(1, 12),
    )
    def add_donor(
        self, data: st.DataObject, rank: DonorRank, extent_bytes: int, extents: int
    ) -> None:
        key = data.draw(st.sampled_from(sorted(set(range(5)) - set(self.donors))))
        donor = Donor(key, rank, extent_bytes, extents)
        self.pool.add_donor(key, donor.offset_bytes, extent_bytes, extents, rank)
        self.donors[key] = donor

    @precondition(lambda self: self.donors)
    @rule(data=st.data())
    def remove_donor(self, data: st.DataObject) -> None:
        donor = self.some_donor(data)
        if donor.mapped or donor.retiring:
            with pytest.raises(ValueError, match="still has mapped slots"):
                self.pool.remove_donor(donor.key)
        else:
            self.pool.remove_donor(donor.key)
            del self.donors[donor.key]

    @precondition(lambda self: self.donors)
    @rule(data=st.data(), all_of_them=st.booleans())
    def map_slots(self, data: st.DataObject, all_of_them: bool) -> None:
        donor = self.some_donor(data)
        unmapped = set(range(donor.extents)) - donor.mapped - donor.retiring
        slots = sorted(unmapped) if all_of_them else self.some_of(data, unmapped)
        before = donor.usable()
        donor.mapped.update(slots)
        assert self.pool.map_slots(donor.key, slots) == len(donor.usable() - before)

    @precondition(lambda self: self.donors)
    @rule(data=st.data())
    def retire_slots(self, data: st.DataObject) -> None:
        donor = self.some_donor(data)
        slots = self.some_of(data, donor.mapped | donor.retiring)
        self.pool.retire_slots(donor.key, slots)
        donor.mapped.difference_update(slots)
        donor.retiring.update(slots)

    @precondition(lambda self: self.donors)
    @rule(data=st.data())
    def unmap_slots(self, data: st.DataObject) -> None:
        donor = self.some_donor(data)
        slots = self.some_of(data, donor.retiring)
        vacated = not donor.touching(set(slots)) & self.in_use
        assert self.pool.vacated(donor.key, slots) is vacated
        if vacated:
            self.pool.unmap_slots(donor.key, slots)
            donor.retiring.difference_update(slots)
        else:
            with pytest.raises(ValueError, match="in use"):
                self.pool.unmap_slots(donor.key, slots)

    @precondition(lambda self: self.donors)
    @rule(data=st.data())
    def slots_in_another_state_are_refused(self, data: st.DataObject) -> None:
        donor = self.some_donor(data)
        slot = data.draw(st.integers(0, donor.extents - 1))
        legal = [slot] if slot in donor.retiring else []
        illegal = {
            self.pool.map_slots: slot in donor.mapped | donor.retiring,
            self.pool.retire_slots: slot not in donor.mapped | donor.retiring,
            self.pool.unmap_slots: slot not in donor.retiring,
        }
        for operation, refused in illegal.items():
            if refused:
                # Named last: what stands before it must not have been done.
                with pytest.raises(ValueError, match=f"slot {slot} of donor {donor.key}"):
                    operation(donor.key, [s for s in legal if s != slot] + [slot])

    @rule(data=st.data())
    def alloc(self, data: st.DataObject) -> None:
        free = {key: donor.usable() - self.in_use for key, donor in self.donors.items()}
        total = sum(len(blocks) for blocks in free.values())
        n = data.draw(st.integers(0, total + 2), label="n")
        ids = self.pool.alloc(n)
        if n > total:
            assert ids is None
            return
        assert ids is not None
        assert ids.dtype == np.int64
        given = set(ids.tolist())
        assert len(given) == ids.size == n
        in_order = sorted(self.donors)
        expected = share(n, [Room(self.donors[key].rank, len(free[key])) for key in in_order])
        assert expected == [len(given & free[key]) for key in in_order]
        self.in_use |= given

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.in_use)), unique=True), label="ids")
        self.pool.free(np.array(ids, dtype=np.int64))
        self.in_use.difference_update(ids)

    @precondition(lambda self: self.in_use)
    @rule(data=st.data())
    def free_all_that_must_be_vacated(self, data: st.DataObject) -> None:
        ids = self.pool.retiring_in_use()
        self.pool.free(ids)
        self.in_use.difference_update(ids.tolist())

    @rule(data=st.data(), wrong=st.integers(-3, 5 * SPACING // BLOCK + 50))
    def wrong_ids_are_refused(self, data: st.DataObject, wrong: int) -> None:
        right = sorted(self.in_use)
        good = data.draw(st.lists(st.sampled_from(right), unique=True)) if right else []
        if wrong in self.in_use:  # then once more is what is wrong
            good = [*(block for block in good if block != wrong), wrong]
        with pytest.raises(ValueError, match="block"):
            self.pool.free(np.array([*good, wrong], dtype=np.int64))

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        all_usable: set[int] = set()
        sums = np.zeros(4, dtype=np.int64)
        must_vacate = set()
        for key, donor in self.donors.items():
            used = donor.blocks() & self.in_use
            usable = donor.usable()
            all_usable |= usable
            must_vacate |= used - usable
            expected = BlockCounts(
                total=len(usable | used),
                free=len(usable - used),
                used=len(used & usable),
                retiring=len(used - usable),
            )
            assert self.pool.donor_counts(key) == expected
            assert expected.total == expected.free + expected.used + expected.retiring
            sums += np.array(expected)
        assert self.pool.counts() == BlockCounts(*sums.tolist())
        assert sorted(self.pool.retiring_in_use().tolist()) == sorted(must_vacate)
        assert sorted(self.pool.in_use().tolist()) == sorted(self.in_use)
        held = np.array(sorted(self.in_use), dtype=np.int64)
        assert self.pool.donor_of(held).tolist() == [
            next(key for key, donor in self.donors.items() if block in donor.blocks())
            for block in held.tolist()
        ]


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def pool_of(*ranks: DonorRank, blocks: int = 64) -> BlockPool:
    """Donors 0, 1, … of one slot with `blocks` blocks each, all mapped."""
    pool = BlockPool(BLOCK)
    for key, rank in enumerate(ranks):
        pool.add_donor(key, key * blocks * BLOCK, blocks * BLOCK, 1, rank)
        pool.map_slots(key, [0])
    return pool


def alloc(pool: BlockPool, n: int) -> np.ndarray:
    ids = pool.alloc(n)
    assert ids is not None
    return ids


def test_any_run_of_an_allocation_is_spread_over_the_donors() -> None:
    pool = pool_of(NVLINK, NVLINK, HOST)
    owners = pool.donor_of(alloc(pool, 60))
    for start in range(0, 60, 10):
        assert np.bincount(owners[start : start + 10], minlength=3).tolist() == [5, 5, 0]


def test_a_straddling_block_goes_with_either_of_its_slots_and_comes_back_with_both() -> None:
    pool = BlockPool(BLOCK)
    pool.add_donor(7, 0, BLOCK * 3 // 2, 2, HOST)  # block 1 lies across the edge
    assert pool.map_slots(7, [0]) == 1
    assert pool.map_slots(7, [1]) == 2
    ids = alloc(pool, 3)
    pool.retire_slots(7, [1])
    assert pool.retiring_in_use().tolist() == [1, 2]
    pool.free(ids)
    assert pool.counts() == BlockCounts(total=1, free=1, used=0, retiring=0)
    pool.unmap_slots(7, [1])
    assert pool.map_slots(7, [1]) == 2


def test_freed_blocks_are_handed_out_before_untouched_ones() -> None:
    pool = pool_of(HOST)
    first = alloc(pool, 5)
    assert first.tolist() == [0, 1, 2, 3, 4]
    pool.free(first)
    assert sorted(alloc(pool, 5).tolist()) == [0, 1, 2, 3, 4]


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = pool_of(NVLINK, HOST, blocks=4)
    assert pool.alloc(9) is None
    assert pool.counts().free == 8
    assert BlockPool(BLOCK).alloc(1) is None
    assert alloc(BlockPool(BLOCK), 0).size == 0
    with pytest.raises(ValueError, match="-1"):
        pool.alloc(-1)


def test_ids_of_an_allocation_belong_to_the_caller() -> None:
    pool = pool_of(HOST)
    ids = alloc(pool, 8)
    kept = ids.copy()
    ids[:] = 0  # a caller may reuse its array
    pool.free(kept)
    pool.check()
    assert sorted(alloc(pool, 64).tolist()) == list(range(64))


@pytest.mark.parametrize(
    "ids",
    [
        np.array([0, 0]),
        np.array([0, 1, 40]),  # 40 is free
        np.array([0, 64]),  # past the end
        np.array([-1, 0]),
        np.array([0.0, 1.0]),
        np.array([[0, 1]]),
        np.array([True, False]),
        np.int64(0),
    ],
    ids=repr,
)
def test_ids_that_cannot_be_freed_change_nothing(ids: np.ndarray) -> None:
    pool = pool_of(HOST)
    held = alloc(pool, 3)
    with pytest.raises(ValueError, match="block"):
        pool.free(ids)
    assert pool.counts() == BlockCounts(total=64, free=61, used=3, retiring=0)
    pool.check()
    pool.free(held)
    pool.free(np.array([]))  # nothing to free
    with pytest.raises(ValueError, match="not in use"):
        pool.free(held)


def test_a_donor_in_a_place_that_is_taken_or_under_a_known_key_is_refused() -> None:
    pool = pool_of(HOST, HOST)
    with pytest.raises(ValueError, match="already in the pool"):
        pool.add_donor(1, 1000 * BLOCK, BLOCK, 1, HOST)
    with pytest.raises(ValueError, match="overlap"):
        pool.add_donor(2, 127 * BLOCK, BLOCK, 4, HOST)
    with pytest.raises(ValueError, match="multiple of the block size"):
        pool.add_donor(2, 128 * BLOCK + 1, BLOCK, 4, HOST)
    pool.add_donor(2, 128 * BLOCK, BLOCK, 4, HOST)
    with pytest.raises(ValueError, match="donor 9 is not in the pool"):
        pool.map_slots(9, [0])


@pytest.mark.parametrize("slots", [[4], [-1], [0, 0], [1, 7]])
def test_slots_that_are_not_there_or_twice_are_refused(slots: list[int]) -> None:
    pool = BlockPool(BLOCK)
    pool.add_donor(0, 0, BLOCK, 4, HOST)
    with pytest.raises(ValueError, match="slots"):
        pool.map_slots(0, slots)
    assert pool.counts().total == 0
    with pytest.raises(ValueError, match="slots"):
        pool.vacated(0, slots)


def test_check_notices_a_ledger_that_is_off() -> None:
    pool = pool_of(NVLINK)
    ids = alloc(pool, 4)
    pool._donors[0].states[ids[0]] = 1  # free, says the state; the stack says it is not
    with pytest.raises(AssertionError, match="donor 0"):
        pool.check()


def test_the_first_lend_imports_nothing() -> None:
    """A scheduler step would wait for it, for as long as ten lends take."""
    status, imported = run_child(
        "import sys\n"
        "from swiftcache_tier.blocks import BlockPool, DonorRank, Link\n"
        "pool = BlockPool(4096)\n"
        "before = set(sys.modules)\n"
        "pool.add_donor(1, 0, 6144, 4, DonorRank(Link.HOST, 1.0))\n"
        "assert pool.map_slots(1, [0, 1]) == 3\n"
        "pool.free(pool.alloc(2))\n"
        "pool.retire_slots(1, [0, 1])\n"
        "pool.unmap_slots(1, [0, 1])\n"
        "print(*(set(sys.modules) - before))\n"
    )
    assert (status, imported) == (0, "\n")
