"""What the control thread reports to the scheduler thread."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from swiftcache_tier.topology import LinkReport


class DonorJoined(NamedTuple):
    """A donor's extents have a place in the address range; none is mapped yet."""

    key: int
    name: str
    device: str
    device_uuid: str | None
    pid: int
    offset_bytes: int
    extent_bytes: int
    extents: int
    link: LinkReport
    elastic: bool = False
    """It is a serving engine, which lends what it can spare."""


class ExtentsMapped(NamedTuple):
    """Slots of a donor can be used."""

    key: int
    slots: list[int]


class BandwidthMeasured(NamedTuple):
    """How fast this donor's memory is read; until it comes, what its link should reach counts."""

    key: int
    gb_per_s: float


class ReclaimAsked(NamedTuple):
    """The donor asks slots back; each is reported once."""

    key: int
    slots: list[int]
    asked_s: float
    """When the donor's message came, by the monotonic clock."""
    deadline_s: float
    """From then on."""
    reason: str


class DonorLost(NamedTuple):
    """Nothing more will be heard of this donor. What is mapped stays so until it is released."""

    key: int
    reason: str


Event: TypeAlias = DonorJoined | ExtentsMapped | BandwidthMeasured | ReclaimAsked | DonorLost
