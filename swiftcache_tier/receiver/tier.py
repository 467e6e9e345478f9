"""The donor tier as a scheduler uses it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftcache_tier.blocks import BlockPool
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import address_range_for, describe_device
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.receiver.control_thread import ControlThread
from swiftcache_tier.receiver.donations import Donation
from swiftcache_tier.receiver.events import (
    BandwidthMeasured,
    DonorJoined,
    DonorLost,
    Event,
    ExtentsMapped,
    ReclaimAsked,
)
from swiftcache_tier.receiver.reach import Reach
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import count_extents, format_size
from swiftcache_tier.spec import DonorSpec

logger = logging.getLogger(__name__)

KEPT_DURATIONS = 1024
"""Durations kept for a reader that may not exist: enough for every second of a busy server."""

_NO_BLOCKS = np.empty(0, dtype=np.int64)


@dataclass
class _ReclaimTotals:
    asked: int = 0
    """One may come in several messages; it is over when the donor has all that it asked."""
    in_time: int = 0
    late: int = 0
    lost: int = 0
    """Donors that were lost with memory mapped."""
    seconds: float = 0.0
    """Spent on reclaims that are finished, from the request to the last slot given back."""


class DonorTier:
    """Blocks of memory that donors lend.

    All methods are for one thread, the scheduler's; none but `start` and `close` blocks. Blocks are
    named by int64 ids, of which any number lies on any donor; `addresses` says where.
    """

    def __init__(
        self,
        specs: Sequence[DonorSpec],
        block_bytes: int,
        *,
        settings: Settings,
        runtime_dir: Path,
        receiver_name: str,
        device: str = "cpu",
        own_donor: DonorPaths | None = None,
    ) -> None:
        """Reserves addresses, no memory. `receiver_name` is what operators read in `status`.

        `device`, "cpu" or "cuda:N", is what reads and writes the blocks. For a GPU host memory is
        locked and mapped at the same addresses for CPU and GPU, and memory of GPUs for that GPU
        alone. `own_donor` is never joined. Raises SwiftCacheError when there is no such device.
        """
        self.block_bytes = block_bytes
        self._reach = Reach(device)
        self._specs = specs
        self._settings = settings
        self._pool = BlockPool(block_bytes)
        self._address_range = address_range_for(device, settings.address_space_bytes)
        self._control = ControlThread(
            block_bytes=block_bytes,
            address_range=self._address_range,
            reach=self._reach,
            settings=settings,
            runtime_dir=runtime_dir,
            receiver_name=receiver_name,
            own_donor=own_donor,
        )
        self._donations: dict[int, Donation] = {}
        self._to_finish: set[int] = set()
        self._reclaims = _ReclaimTotals()
        self.reclaim_seconds: deque[float] = deque(maxlen=KEPT_DURATIONS)
        """Of the reclaims that finished since a reader last emptied it."""
        self._closed = False

    def start(self) -> None:
        """Join the donors of all SPECs; returns when each has granted its memory.

        Raises SwiftCacheError when one has not after `join_timeout_s`, or when what was granted
        holds no block; nothing is left behind then.
        """
        try:
            self._control.start()
            self._control.join(self._specs)
            self.poll()
            elastic = any(donation.joined.elastic for donation in self._donations.values())
            if self.total_blocks == 0 and not elastic:
                granted = sum(
                    len(d.mapped) * d.joined.extent_bytes for d in self._donations.values()
                )
                raise SwiftCacheError(
                    f"the donors granted {format_size(granted)}, which has no room for one block "
                    f"of {format_size(self.block_bytes)}: ask one donor for many times that, as "
                    f"in host=8GiB"
                )
        except BaseException:
            self.close()
            raise

    def poll(self) -> None:
        """Take note of what donors did since the last call; call it at every scheduler step.

        Does nothing in most calls. Memory that was asked back is unmapped and released here once
        its blocks are vacated.
        """
        while self._control.events:
            self._take(self._control.events.popleft())
        for key in list(self._to_finish):
            self._finish(key)

    def alloc(self, blocks: int) -> np.ndarray | None:
        """Ids of `blocks` free blocks, shape (blocks,); None if there are fewer."""
        return self._pool.alloc(blocks)

    def alloc_apart(self, placed: np.ndarray) -> np.ndarray:
        """A free block for each row of ids, on a donor that holds none of the row; -1 where no
        other donor has room. `placed`: int64 (n, k), -1 for none; returns int64 (n,)."""
        return self._pool.alloc_apart(placed)

    def has_room(self, blocks: int, copies: int) -> bool:
        """Whether `blocks` more would fit, `copies` times each on different donors; with fewer
        donors than that, once on each."""
        return self._pool.has_room(blocks, copies)

    def free(self, ids: np.ndarray) -> None:
        """Give blocks back. Nothing may read or write them any more.

        Raises ValueError, and frees none, if one is not in use or is given twice.
        """
        self._pool.free(ids)

    def free_all(self) -> None:
        """Give every block back, for a cache that is flushed; the memory stays lent."""
        self._pool.free(self._pool.in_use())

    def must_vacate(self) -> np.ndarray:
        """Ids in use whose memory is asked back or whose donor is lost: free them soon.

        Until then they can be read as before.
        """
        return self._pool.retiring_in_use() if self._to_finish else _NO_BLOCKS

    def past_deadline(self, ids: np.ndarray) -> np.ndarray:
        """Which blocks, bool in the shape of `ids`, lie with a donor that was lost more than
        `drain_deadline_s` ago: they are not worth moving any more."""
        before_s = time.monotonic() - self._settings.drain_deadline_s
        late = [k for k, d in self._donations.items() if d.lost and d.lost_s <= before_s]
        return np.isin(self.donor_of(ids), late)

    @property
    def base_address(self) -> int:
        """Address of block 0, where memory need not be mapped. Never changes."""
        return self._address_range.base

    def addresses(self, ids: np.ndarray) -> np.ndarray:
        """Addresses of blocks, int64, in the shape of `ids`."""
        return self.base_address + np.asarray(ids, dtype=np.int64) * self.block_bytes

    def donor_of(self, ids: np.ndarray) -> np.ndarray:
        """For each block the key of the donor it lies on, int64; see `donor_names`."""
        return self._pool.donor_of(ids)

    def in_gpu_memory(self, ids: np.ndarray) -> bool:
        """Whether all these blocks lie in memory of GPUs, and none in host memory."""
        if "cuda" not in self._address_range.names:
            return False
        window = self._address_range.window("cuda")
        offsets = ids * self.block_bytes
        return bool(np.all((offsets >= window.start_bytes) & (offsets < window.end_bytes)))

    def donor_names(self) -> dict[int, str]:
        """Names of donors by key. A donor that comes back has a new key and the same name."""
        return {key: donation.joined.name for key, donation in self._donations.items()}

    def link_kinds(self) -> dict[int, str]:
        """How each donor is reached, by key: "nvlink", "host" and so on (`topology.LinkKind`)."""
        return {key: donation.joined.link.kind for key, donation in self._donations.items()}

    def lost_donors(self) -> set[int]:
        """Keys of donors that are lost and whose memory is not vacated yet."""
        return {key for key, donation in self._donations.items() if donation.lost}

    def extents_to_return(self) -> int:
        """Extents that are asked back, or whose donor is lost, and still mapped."""
        return sum(len(self._donations[key].retiring) for key in self._to_finish)

    @property
    def free_blocks(self) -> int:
        """Blocks that `alloc` could hand out."""
        return self._pool.counts().free

    @property
    def used_blocks(self) -> int:
        """Blocks that were handed out, those that must be vacated included."""
        counts = self._pool.counts()
        return counts.used + counts.retiring

    @property
    def total_blocks(self) -> int:
        return self._pool.counts().total

    def check(self) -> None:
        """Recount all blocks; AssertionError if the books are off. For tests; takes time."""
        self._pool.check()

    def status(self) -> dict[str, Any]:
        """How things stand, in plain types that JSON has."""
        counts = self._pool.counts()
        return {
            "device": self._reach.device,
            "donors": [self._donor_status(key) for key in sorted(self._donations)],
            "block_bytes": self.block_bytes,
            "blocks": counts._asdict(),
            "bytes": sum(d.joined.extent_bytes * len(d.mapped) for d in self._donations.values()),
            "orphaned_extents": sum(len(d.mapped) for d in self._donations.values() if d.lost),
            "reclaims": {
                "asked": self._reclaims.asked,
                "in_time": self._reclaims.in_time,
                "late": self._reclaims.late,
                "donors_lost": self._reclaims.lost,
                "seconds": round(self._reclaims.seconds, 6),
            },
        }

    def close(self) -> None:
        """Unmap everything, leave all donors, end those that are owned. May be repeated.

        Nothing may read or write donor memory any more.
        """
        if self._closed:
            return
        self._closed = True
        self._to_finish.clear()
        if not self._control.stop():
            logger.error("the control thread did not end: donor memory stays mapped")
            return
        self._control.events.clear()
        try:
            self._address_range.close()
        except OSError as error:  # a GPU that has failed, most likely
            logger.error("donor memory stays mapped until this process ends: %s", error)

    def _take(self, event: Event) -> None:
        match event:
            case DonorJoined():
                self._join(event)
            case ExtentsMapped():
                self._pool.map_slots(event.key, event.slots)
                self._donations[event.key].mapped.update(event.slots)
            case BandwidthMeasured():
                donation = self._donations[event.key]
                donation.gb_per_s = event.gb_per_s
                self._pool.set_rank(event.key, donation.joined.link.rank(event.gb_per_s))
            case ReclaimAsked():
                self._ask_back(event)
            case DonorLost():
                self._lose(event)

    def _join(self, event: DonorJoined) -> None:
        self._pool.add_donor(
            event.key, event.offset_bytes, event.extent_bytes, event.extents, event.link.rank()
        )
        self._donations[event.key] = Donation(event)
        logger.info(
            "donor %s (process %d) joined: %s by %s, %s of %s",
            event.name,
            event.pid,
            describe_device(event.device, event.device_uuid, None),
            event.link,
            count_extents(event.extents),
            format_size(event.extent_bytes),
            extra={
                "event": "donor_joined",
                "donor": event.name,
                "donor_pid": event.pid,
                "extents": event.extents,
                "link": event.link.kind,
            },
        )

    def _ask_back(self, event: ReclaimAsked) -> None:
        donation = self._donations[event.key]
        if not donation.retiring:
            self._reclaims.asked += 1
            donation.asked_s = event.asked_s
            donation.deadline_s = event.deadline_s
        self._retire(event.key, event.slots)

    def _lose(self, event: DonorLost) -> None:
        donation = self._donations[event.key]
        donation.lost = True
        donation.lost_s = time.monotonic()
        if donation.mapped:
            self._reclaims.lost += 1
        self._retire(event.key, sorted(donation.mapped))
        counts = self._pool.donor_counts(event.key)
        logger.log(
            logging.WARNING if donation.mapped else logging.INFO,
            "donor %s (process %d) is gone, %s: %d extents are left to vacate, with %d blocks in "
            "use",
            donation.joined.name,
            donation.joined.pid,
            event.reason,
            len(donation.mapped),
            counts.retiring,
            extra={
                "event": "donor_lost",
                "donor": donation.joined.name,
                "donor_pid": donation.joined.pid,
                "extents": len(donation.mapped),
                "reason": event.reason,
            },
        )

    def _retire(self, key: int, slots: list[int]) -> None:
        donation = self._donations[key]
        self._pool.retire_slots(key, slots)
        donation.retiring.update(slots)
        donation.retiring_blocks_seen = None
        self._to_finish.add(key)

    def _finish(self, key: int) -> None:
        """Give back what has been vacated, if anything has since the last look."""
        donation = self._donations[key]
        in_use = self._pool.donor_counts(key).retiring
        if in_use != donation.retiring_blocks_seen:
            donation.retiring_blocks_seen = in_use
            self._give_back(key, donation)
        if donation.retiring:
            return
        self._to_finish.remove(key)
        if donation.lost:
            self._pool.remove_donor(key)
            del self._donations[key]
            self._control.forget(key)
            return
        spent_s = time.monotonic() - donation.asked_s
        self._reclaims.seconds += spent_s
        self.reclaim_seconds.append(spent_s)
        if spent_s <= donation.deadline_s:
            self._reclaims.in_time += 1
        else:
            self._reclaims.late += 1

    def _give_back(self, key: int, donation: Donation) -> None:
        retiring = self._pool.retiring_in_use()
        mine = retiring[self._pool.donor_of(retiring) == key]
        slots = donation.vacated(mine, self.block_bytes)
        if slots:
            self._pool.unmap_slots(key, slots)
            donation.mapped.difference_update(slots)
            donation.retiring.difference_update(slots)
            self._control.release(key, slots)

    def _donor_status(self, key: int) -> dict[str, Any]:
        donation = self._donations[key]
        joined = donation.joined
        link = self._control.link(key)
        lease_counts = {} if link is None else link.lent.counts()
        return {
            "name": joined.name,
            "pid": joined.pid,
            "device": joined.device,
            "device_uuid": joined.device_uuid,
            "elastic": joined.elastic,
            "link": joined.link.kind,
            "link_details": {
                **joined.link.as_status(),
                "expected_gb_per_s": round(joined.link.expected_gb_per_s, 1),
                "measured_gb_per_s": donation.gb_per_s and round(donation.gb_per_s, 1),
            },
            "state": "lost" if donation.lost else "draining" if donation.retiring else "joined",
            "extent_bytes": joined.extent_bytes,
            "extents": {str(state): lease_counts.get(state, 0) for state in LeaseState},
            "extents_total": joined.extents,
            "bytes": len(donation.mapped) * joined.extent_bytes,
            "blocks": self._pool.donor_counts(key)._asdict(),
        }
