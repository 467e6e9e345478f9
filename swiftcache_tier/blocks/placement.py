"""How many blocks of an allocation go to which donor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Link(IntEnum):
    """How a receiver reaches a donor's memory; a higher one is filled first."""

    HOST = 0
    PCIE_PEER = 1
    NVLINK = 2


@dataclass(frozen=True)
class DonorRank:
    """What placement knows of a donor's link; the bandwidth is as measured."""

    link: Link
    gb_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.gb_per_s) and self.gb_per_s > 0):
            raise ValueError(f"bandwidth of {self.gb_per_s} GB/s: must be positive and finite")


class Room(NamedTuple):
    """What one donor can take."""

    rank: DonorRank
    free_blocks: int


def share(blocks: int, rooms: Sequence[Room]) -> list[int] | None:
    """How many of `blocks` each of `rooms` takes, in their order; None if they do not all fit.

    The best link is filled before the next is touched. Within a link each donor takes a share in
    proportion to bandwidth times free blocks: what reads the blocks back then waits for no donor
    longer than for the others, and all fill up at about the same time.
    """
    if blocks > sum(room.free_blocks for room in rooms):
        return None
    counts = [0] * len(rooms)
    for link in sorted({room.rank.link for room in rooms}, reverse=True):
        members = [i for i, room in enumerate(rooms) if room.rank.link == link]
        placed = min(blocks, sum(rooms[i].free_blocks for i in members))
        for i, count in zip(members, _divide(placed, [rooms[i] for i in members]), strict=True):
            counts[i] = count
        blocks -= placed
    return counts


def fits(blocks: int, copies: int, free_blocks: Sequence[int]) -> bool:
    """Whether `blocks` blocks, `copies` times each and never twice on one donor, fit into donors
    with so many free blocks. With fewer donors than copies, one on each donor is all that is asked.
    """
    copies = max(1, min(copies, len(free_blocks)))
    return sum(min(free, blocks) for free in free_blocks) >= copies * blocks


def _divide(blocks: int, rooms: Sequence[Room]) -> list[int]:
    """`blocks`, which fit, over donors of one link: largest remainders, nobody over its room.

    In whole numbers, so that the shares add up whatever the bandwidths are.
    """
    weights = [max(1, round(room.rank.gb_per_s * 1000)) * room.free_blocks for room in rooms]
    counts = [0] * len(rooms)
    open_rooms = [i for i, weight in enumerate(weights) if weight > 0]
    while blocks > 0:
        total = sum(weights[i] for i in open_rooms)
        full = [i for i in open_rooms if blocks * weights[i] >= rooms[i].free_blocks * total]
        if not full:
            break
        for i in full:
            counts[i] = rooms[i].free_blocks
            blocks -= counts[i]
        open_rooms = [i for i in open_rooms if i not in full]
    if blocks > 0:
        parts = {i: divmod(blocks * weights[i], total) for i in open_rooms}
        left = blocks - sum(whole for whole, _ in parts.values())
        by_rest = sorted(open_rooms, key=lambda i: parts[i][1], reverse=True)
        for place, i in enumerate(by_rest):
            counts[i] = parts[i][0] + (place < left)
    return counts
