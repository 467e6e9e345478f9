"""Which blocks of donor memory are in use: the receiver's allocator and ledger.

Blocks are numbered through the receiver's whole address range (see `geometry`). A block can be
handed out while every slot it touches is mapped and none is being asked back.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from swiftcache_tier.blocks.geometry import DonorGeometry
from swiftcache_tier.blocks.placement import DonorRank, Room, fits, share


class _Slot(IntEnum):
    UNMAPPED = 0
    MAPPED = 1
    RETIRING = 2


class _Block(IntEnum):
    CLOSED = 0  # not in use, and touches a slot that is unmapped or retiring
    FREE = 1
    USED = 2
    RETIRING = 3  # in use, and touches a slot that is retiring


class BlockCounts(NamedTuple):
    """Blocks by state; `retiring` ones are in use and must be vacated."""

    total: int
    free: int
    used: int
    retiring: int


class _DonorBlocks:
    """The blocks of one donor. Local block i is global block `first_block + i`."""

    def __init__(self, geometry: DonorGeometry, rank: DonorRank) -> None:
        self.geometry = geometry
        self.rank = rank
        self.slots = np.full(geometry.extents, _Slot.UNMAPPED, dtype=np.uint8)
        self.states = np.full(geometry.blocks, _Block.CLOSED, dtype=np.uint8)
        # Slots a block touches that are not MAPPED; it may be handed out at 0.
        self.obstacles = geometry.slots_per_block()
        # Last in, first out: host memory that was touched before is handed out again before
        # untouched pages cost RAM.
        self.free_stack = np.empty(geometry.blocks, dtype=np.int64)
        self.free = 0
        self.used = 0
        self.retiring = 0

    def counts(self) -> BlockCounts:
        total = self.free + self.used + self.retiring
        return BlockCounts(total, self.free, self.used, self.retiring)

    def pop(self, n: int) -> np.ndarray:
        self.free -= n
        local = self.free_stack[self.free : self.free + n][::-1].copy()
        self.states[local] = _Block.USED
        self.used += n
        return local

    def push(self, local: np.ndarray) -> None:
        """Make blocks that are counted nowhere free."""
        self.states[local] = _Block.FREE
        # Reversed, so that an ascending run is handed out ascending.
        self.free_stack[self.free : self.free + local.size] = local[::-1]
        self.free += local.size

    def give_back(self, local: np.ndarray) -> None:
        retiring = self.states[local] == _Block.RETIRING
        n_retiring = int(np.count_nonzero(retiring))
        if n_retiring:
            self.states[local[retiring]] = _Block.CLOSED
            local = local[~retiring]
        self.retiring -= n_retiring
        self.used -= local.size
        self.push(local)

    def open_slots(self, slots: np.ndarray) -> int:
        """The slots become MAPPED; returns how many blocks can be used because of it."""
        touching = self.geometry.blocks_touching(slots)
        np.subtract.at(self.obstacles, touching, 1)
        self.slots[slots] = _Slot.MAPPED
        opened = np.unique(touching[self.obstacles[touching] == 0])
        self.push(opened)
        return int(opened.size)

    def retire_slots(self, slots: np.ndarray) -> None:
        touching = self.geometry.blocks_touching(slots)
        np.add.at(self.obstacles, touching, 1)
        self.slots[slots] = _Slot.RETIRING
        local = np.unique(touching)
        in_use = local[self.states[local] == _Block.USED]
        self.states[in_use] = _Block.RETIRING
        self.used -= in_use.size
        self.retiring += in_use.size
        not_in_use = local[self.states[local] == _Block.FREE]
        self.states[not_in_use] = _Block.CLOSED
        stack = self.free_stack[: self.free]
        kept = stack[self.states[stack] == _Block.FREE]
        self.free_stack[: kept.size] = kept
        self.free = kept.size

    def in_use(self, slots: Sequence[int] | np.ndarray) -> bool:
        states = self.states[self.geometry.blocks_touching(slots)]
        return bool(np.any(states >= _Block.USED))


class BlockPool:
    """Allocator and ledger over the memory of any number of donors.

    A donor's slots go UNMAPPED -> (`map_slots`) MAPPED -> (`retire_slots`) RETIRING ->
    (`unmap_slots`) UNMAPPED. Only the scheduler thread uses a pool; there are no locks. Block ids
    are int64 arrays of shape (n,). A breach of the contract raises ValueError and changes nothing.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._donors: dict[int, _DonorBlocks] = {}
        self._index_donors()

    def add_donor(
        self,
        key: int,
        first_block_offset_bytes: int,
        extent_bytes: int,
        extents: int,
        rank: DonorRank,
    ) -> None:
        """Enter a donor of `extents` slots, none mapped yet, from an offset of the address range.

        The offset is a multiple of `block_bytes`, and no other donor's blocks lie there.
        """
        if key in self._donors:
            raise ValueError(f"donor {key} is already in the pool")
        geometry = DonorGeometry(self.block_bytes, extent_bytes, extents, first_block_offset_bytes)
        end_bytes = geometry.offset_bytes + extents * extent_bytes
        for other_key, other in self._donors.items():
            theirs = other.geometry
            their_end_bytes = theirs.offset_bytes + theirs.extents * theirs.extent_bytes
            if geometry.offset_bytes < their_end_bytes and theirs.offset_bytes < end_bytes:
                raise ValueError(f"donors {key} and {other_key} overlap in the address range")
        self._donors[key] = _DonorBlocks(geometry, rank)
        self._index_donors()

    def set_rank(self, key: int, rank: DonorRank) -> None:
        """Place blocks by this from now on; those in use stay where they are."""
        self._donor(key).rank = rank

    def remove_donor(self, key: int) -> None:
        """Forget a donor, all of whose slots are unmapped."""
        if np.any(self._donor(key).slots != _Slot.UNMAPPED):
            raise ValueError(f"donor {key} still has mapped slots")
        del self._donors[key]
        self._index_donors()

    def map_slots(self, key: int, slots: Sequence[int]) -> int:
        """Slots that were UNMAPPED have memory now. Returns how many free blocks that gave."""
        return self._donor(key).open_slots(self._slots(key, slots, _Slot.UNMAPPED))

    def retire_slots(self, key: int, slots: Sequence[int]) -> None:
        """Hand out no block of these slots any more; those in use become retiring.

        Slots that are retiring already stay so. Costs in proportion to the donor's blocks.
        """
        donor = self._donor(key)
        chosen = self._slots(key, slots, _Slot.MAPPED, _Slot.RETIRING)
        donor.retire_slots(chosen[donor.slots[chosen] == _Slot.MAPPED])

    def retiring_in_use(self) -> np.ndarray:
        """Ids of the retiring blocks: whoever uses them is to move or forget and `free` them."""
        parts = [
            np.flatnonzero(donor.states == _Block.RETIRING) + donor.geometry.first_block
            for donor in self._order
            if donor.retiring
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def vacated(self, key: int, slots: Sequence[int]) -> bool:
        """Whether no block that touches these slots is in use."""
        return not self._donor(key).in_use(slots)

    def unmap_slots(self, key: int, slots: Sequence[int]) -> None:
        """The memory of these slots, which are retiring and vacated, is gone."""
        donor = self._donor(key)
        chosen = self._slots(key, slots, _Slot.RETIRING)
        if donor.in_use(chosen):
            raise ValueError(f"slots {list(slots)} of donor {key} hold blocks that are in use")
        donor.slots[chosen] = _Slot.UNMAPPED

    def alloc(self, n: int) -> np.ndarray | None:
        """Ids of `n` free blocks, placed by `placement.share`; None if there are fewer.

        Blocks of several donors alternate in the result, so any run of it is spread over them.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        counts = share(n, [Room(donor.rank, donor.free) for donor in self._order])
        if counts is None:
            return None
        parts = [
            donor.pop(count) + donor.geometry.first_block
            for donor, count in zip(self._order, counts, strict=True)
            if count
        ]
        if len(parts) < 2:
            return parts[0] if parts else np.empty(0, dtype=np.int64)
        places = [(np.arange(part.size) + 0.5) / part.size for part in parts]
        ids: np.ndarray = np.concatenate(parts)[np.argsort(np.concatenate(places), kind="stable")]
        return ids

    def alloc_apart(self, placed: np.ndarray) -> np.ndarray:
        """For each row of `placed` a free block on a donor that holds no block of that row.

        `placed`: ids in use, int64 (n, k), -1 for none. Returns int64 (n,), -1 where no other donor
        has room.
        """
        owners = np.full(placed.shape, -1, dtype=np.int64)
        owners[placed >= 0] = self._locate(placed[placed >= 0])[1]
        owners.sort(axis=1)
        ids = np.full(len(placed), -1, dtype=np.int64)
        kinds, kind_of_row = np.unique(owners, axis=0, return_inverse=True)
        for kind, taken in enumerate(kinds.tolist()):
            others = [donor for place, donor in enumerate(self._order) if place not in taken]
            rows = np.flatnonzero(kind_of_row.reshape(-1) == kind)
            rows = rows[: sum(donor.free for donor in others)]
            counts = share(rows.size, [Room(donor.rank, donor.free) for donor in others])
            assert counts is not None
            for donor, count in zip(others, counts, strict=True):
                ids[rows[:count]] = donor.pop(count) + donor.geometry.first_block
                rows = rows[count:]
        return ids

    def has_room(self, blocks: int, copies: int) -> bool:
        """Whether `blocks` more would fit, `copies` times each on different donors."""
        donors = [donor for donor in self._order if donor.counts().total]
        return fits(blocks, copies, [donor.free for donor in donors])

    def free(self, ids: np.ndarray) -> None:
        """Give blocks back. One that is retiring becomes vacated instead of free.

        Raises ValueError, and frees none, if an id is given twice, is not in use, or is no block of
        a donor in the pool.
        """
        ids, owners = self._locate(ids)
        ordered = np.sort(ids)
        if np.any(ordered[1:] == ordered[:-1]):
            raise ValueError("a block is given twice")
        parts = []
        for owner in np.unique(owners):
            donor = self._order[owner]
            local = ids[owners == owner] - donor.geometry.first_block
            idle = local[donor.states[local] < _Block.USED]
            if idle.size:
                block = int(idle[0]) + donor.geometry.first_block
                raise ValueError(f"block {block} is not in use ({idle.size} such blocks)")
            parts.append((donor, local))
        for donor, local in parts:
            donor.give_back(local)

    def in_use(self) -> np.ndarray:
        """Ids of all blocks in use, retiring ones included. Costs in proportion to all blocks."""
        parts = [
            np.flatnonzero(donor.states >= _Block.USED) + donor.geometry.first_block
            for donor in self._order
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def donor_of(self, ids: np.ndarray) -> np.ndarray:
        """Keys of the donors that blocks live on, int64. Raises ValueError for a foreign id."""
        _, owners = self._locate(ids)
        keys: np.ndarray = self._keys[owners]
        return keys

    def counts(self) -> BlockCounts:
        """Of all donors together."""
        parts = [BlockCounts(0, 0, 0, 0), *(donor.counts() for donor in self._order)]
        return BlockCounts(*(sum(column) for column in zip(*parts, strict=True)))

    def donor_counts(self, key: int) -> BlockCounts:
        """Of one donor."""
        return self._donor(key).counts()

    def check(self) -> None:
        """Recount everything from the slots up; AssertionError names the first thing that is off.

        Costs in proportion to all blocks: for tests, and for a watchdog that found no progress.
        """
        for key, donor in self._donors.items():
            problem = _first_problem(donor)
            if problem is not None:
                raise AssertionError(f"block ledger of donor {key}: {problem}")

    def _index_donors(self) -> None:
        """Lay out what `_locate` and `alloc` look through, in the order of addresses."""
        in_order = sorted(self._donors.items(), key=lambda item: item[1].geometry.offset_bytes)
        geometries = [donor.geometry for _, donor in in_order]
        self._order = [donor for _, donor in in_order]
        self._keys = np.array([key for key, _ in in_order], dtype=np.int64)
        self._firsts = np.array([g.first_block for g in geometries], dtype=np.int64)
        self._ends = np.array([g.first_block + g.blocks for g in geometries], dtype=np.int64)

    def _donor(self, key: int) -> _DonorBlocks:
        if key not in self._donors:
            raise ValueError(f"donor {key} is not in the pool")
        return self._donors[key]

    def _slots(self, key: int, slots: Sequence[int], *expected: _Slot) -> np.ndarray:
        """`slots` as an array; ValueError unless each is there, once, in an expected state."""
        donor = self._donor(key)
        chosen = donor.geometry.slot_array(slots)
        wrong = chosen[~np.isin(donor.slots[chosen], expected)]
        if wrong.size:
            state = _Slot(donor.slots[wrong[0]]).name
            names = " or ".join(state.name for state in expected)
            raise ValueError(f"slot {wrong[0]} of donor {key} is {state}, not {names}")
        return chosen

    def _locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`ids` as int64, and for each the place of its donor in `_order`."""
        given = np.asarray(ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"block ids of shape {given.shape}, {given.dtype}: not a list of ids")
        given = given.astype(np.int64, copy=False)
        owners = np.searchsorted(self._firsts, given, side="right") - 1
        foreign = owners < 0
        if self._order:
            foreign |= given >= self._ends[owners]
        if np.any(foreign):
            raise ValueError(f"block {given[foreign][0]} is of no donor in the pool")
        return given, owners


def _first_problem(donor: _DonorBlocks) -> str | None:
    geometry, states = donor.geometry, donor.states
    closed_slots = np.flatnonzero(donor.slots != _Slot.MAPPED)
    obstacles = np.bincount(geometry.blocks_touching(closed_slots), minlength=geometry.blocks)
    unmapped = np.unique(geometry.blocks_touching(np.flatnonzero(donor.slots == _Slot.UNMAPPED)))
    stack = np.sort(donor.free_stack[: donor.free])
    usable = (states == _Block.FREE) | (states == _Block.USED)
    checks = {
        "obstacles are miscounted": np.array_equal(obstacles, donor.obstacles),
        "a usable block has an obstacle, or one that is not has none": np.array_equal(
            usable, obstacles == 0
        ),
        "a block in use touches an unmapped slot": bool(np.all(states[unmapped] < _Block.USED)),
        "the free stack is not the free blocks": np.array_equal(
            stack, np.flatnonzero(states == _Block.FREE)
        ),
        "used blocks are miscounted": donor.used == np.count_nonzero(states == _Block.USED),
        "retiring blocks are miscounted": donor.retiring
        == np.count_nonzero(states == _Block.RETIRING),
    }
    return next((problem for problem, holds in checks.items() if not holds), None)
