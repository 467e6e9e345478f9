"""All donors of a receiver: joined as asked, found, joined again, left."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import zmq.asyncio

from swiftcache_tier.blocks import SubRanges
from swiftcache_tier.control.door import NoDonor
from swiftcache_tier.control.lendable import lendable_bytes
from swiftcache_tier.control.messages import ErrorCode, MessageError
from swiftcache_tier.control.open_files import bytes_at_most
from swiftcache_tier.control.query import Unresponsive
from swiftcache_tier.control.runtime_dir import (
    DonorPaths,
    donor_paths_at,
    ensure_runtime_dir,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena, JoinedAddressRange, Window
from swiftcache_tier.receiver.discovery import Discovery, identity_of
from swiftcache_tier.receiver.events import DonorJoined, DonorLost, Event
from swiftcache_tier.receiver.greeting import Greeting, greet
from swiftcache_tier.receiver.kept import KeptDonor
from swiftcache_tier.receiver.lent import LentExtents
from swiftcache_tier.receiver.link import DonorLink, LinkState
from swiftcache_tier.receiver.owned import OwnedDonor, owned_donor_paths
from swiftcache_tier.receiver.reach import Reach, kind_of
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import DonorSpec

logger = logging.getLogger(__name__)

# What may be otherwise at the next look; anything else a donor says stays so while it runs.
_PASSING_CODES = (ErrorCode.FULL, ErrorCode.DRAINING)


class _Place(NamedTuple):
    """Where a donor's extents lie in the address range."""

    sub_ranges: SubRanges
    offset: int


class Links:
    """Used by the control thread, on its loop."""

    def __init__(
        self,
        *,
        block_bytes: int,
        address_range: JoinedAddressRange,
        reach: Reach,
        settings: Settings,
        runtime_dir: Path,
        receiver_name: str,
        own_donor: DonorPaths | None,
        emit: Callable[[Event], None],
    ) -> None:
        self._block_bytes = block_bytes
        self._address_range = address_range
        self._reach = reach
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._receiver_name = receiver_name
        self._emit = emit
        self._context = zmq.asyncio.Context()
        self._sub_ranges = {
            name: _sub_ranges(address_range.window(name)) for name in address_range.names
        }
        self._discovery = Discovery(own_donor)
        self._keys = itertools.count(1)
        self._links: dict[int, DonorLink] = {}
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._attempts: set[asyncio.Task[DonorLink | None]] = set()
        self._joining: set[Path] = set()
        self._silent: set[Path] = set()
        """Doors where something listens that gave no answer, and about which that was logged."""
        self._owned: list[KeptDonor] = []
        self._progress_of_ended = 0

    def link(self, key: int) -> DonorLink | None:
        """The link of that key, until it is over; may be called from any thread."""
        return self._links.get(key)

    @property
    def progress(self) -> int:
        """Changes as long as extents are being mapped or unmapped; may be read by any thread."""
        return self._progress_of_ended + sum(link.progress for link in list(self._links.values()))

    async def join(self, specs: Sequence[DonorSpec]) -> None:
        """Return once every SPEC has granted memory. Raises SwiftCacheError for one that did not;
        the others may be joined then. Waits `join_timeout_s`, and on while memory comes."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.join_timeout_s
        await asyncio.gather(*(self._satisfy(spec, deadline_s) for spec in specs))

    async def watch(self) -> None:
        """Join donors that come, or come back, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.discovery_interval_s)
            for paths in self._discovery.find(self._taken()):
                self._attempt(paths)

    def release(self, key: int, slots: list[int]) -> None:
        """Unmap slots that nothing uses any more, and tell the donor."""
        link = self._links.get(key)
        if link is not None:
            link.release(slots)

    def forget(self, key: int) -> None:
        """Nothing of that donor, which is lost, is in use any more."""
        link = self._links.get(key)
        if link is not None:
            link.forget()

    async def leave(self) -> None:
        """Unmap everything, tell all donors, end those that are owned."""
        for attempt in self._attempts:
            attempt.cancel()
        await asyncio.gather(*self._attempts, return_exceptions=True)
        await asyncio.gather(*(donor.let_go() for donor in self._owned))
        for link in self._links.values():
            link.leave()
        tasks = list(self._link_tasks)
        if tasks:
            await self._wait_while_it_moves(tasks, self._settings.leave_timeout_s)
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(donor.end() for donor in self._owned))
        self._context.destroy(linger=0)

    async def _satisfy(self, spec: DonorSpec, deadline_s: float) -> None:
        match spec.kind:
            case "auto":
                await self._join_found(deadline_s)
            case "ipc":
                assert spec.path is not None
                paths = donor_paths_at(spec.path)
                self._discovery.watch(paths)
                await self._require(await self._open(paths), str(spec))
            case "host" | "cuda":
                assert spec.device is not None
                assert spec.size_bytes is not None
                await self._start_own(spec.device, spec.size_bytes, str(spec), deadline_s)

    async def _join_found(self, deadline_s: float) -> None:
        """Join all donors that are there; if that gives no memory, start one for host memory."""
        self._discovery.watch_folder(self._runtime_dir)
        attempts = [self._attempt(paths) for paths in self._discovery.find(self._taken())]
        if attempts:
            # One that is stuck must leave time for what is done instead.
            patience_s = (deadline_s - asyncio.get_running_loop().time()) / 2
            grants = [asyncio.create_task(_granted(attempt)) for attempt in attempts]
            await self._wait_while_it_moves(grants, patience_s)
        if any(link.lent.held for link in self._links.values()):
            return
        free_bytes = await asyncio.to_thread(
            lendable_bytes, HostArena(), self._runtime_dir, self._settings
        )
        size_bytes, why = free_bytes // 2, "half of what is free"
        most_bytes = self._settings.auto_pinned_bytes_max
        if self._reach.pins_host_memory and size_bytes > most_bytes:
            size_bytes, why = most_bytes, "the most that is locked without being asked for"
        most_bytes = bytes_at_most(self._settings)
        if size_bytes > most_bytes:
            size_bytes = most_bytes
            why = (
                f"as many extents of {format_size(self._settings.extent_bytes)} as the limit on "
                f"open files allows: raise it (ulimit -Hn) or SWIFTCACHE_EXTENT_BYTES for more"
            )
        logger.info(
            "no donor in %s gives memory: starting one of %s of host memory, %s",
            self._runtime_dir,
            format_size(size_bytes),
            why,
        )
        await self._start_own(HostArena.device, size_bytes, "auto", deadline_s)

    async def _start_own(self, device: str, size_bytes: int, spec: str, deadline_s: float) -> None:
        window = self._address_range.window(kind_of(device, self._reach.device))
        ensure_runtime_dir(self._runtime_dir)
        paths = owned_donor_paths(device, self._runtime_dir)
        self._joining.add(paths.door)
        start = functools.partial(
            OwnedDonor, device, size_bytes, window.granularity_bytes, paths, self._settings
        )
        donor = KeptDonor(start, self._settings)
        self._owned.append(donor)
        await donor.ready(deadline_s)
        await self._require(await self._open(paths), spec)
        self._discovery.expect(paths)
        donor.keep()

    async def _require(self, link: DonorLink, spec: str) -> None:
        """Wait for all that the donor means to grant; raise SwiftCacheError if it is nothing.

        A serving engine is not waited for: what it lends comes and goes.
        """
        if link.is_elastic:
            logger.info("donor SPEC %s: a serving engine, which lends what it can spare", spec)
            return
        settled = asyncio.create_task(link.settled())
        complete = await self._wait_while_it_moves([settled], self._settings.join_timeout_s)
        if link.lent.held and not complete:
            logger.warning("donor SPEC %s: %d extents so far, more may come", spec, link.lent.held)
        if link.lent.held == 0 and link.lent.problem is not None:
            raise SwiftCacheError(
                f"donor SPEC {spec}: its memory cannot be mapped: {link.lent.problem}"
            )
        if link.lent.held == 0:
            raise SwiftCacheError(
                f"donor SPEC {spec}: granted no memory within {self._settings.join_timeout_s:g} s: "
                f"see who holds it with `swiftcache status`, or name another donor"
            )

    async def _wait_while_it_moves(
        self, tasks: Collection[asyncio.Task[None]], patience_s: float
    ) -> bool:
        """Wait for `tasks` while `progress` changes within `patience_s`, then cancel them.

        Returns whether all were done.
        """
        try:
            while True:
                progress = self.progress
                _, pending = await asyncio.wait(tasks, timeout=patience_s)
                if not pending or self.progress == progress:
                    return not pending
        finally:
            for task in tasks:
                task.cancel()

    def _attempt(self, paths: DonorPaths) -> asyncio.Task[DonorLink | None]:
        """Try to join; what stands against it is logged."""
        self._joining.add(paths.door)
        attempt = asyncio.create_task(self._try_to_open(paths))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)
        return attempt

    async def _try_to_open(self, paths: DonorPaths) -> DonorLink | None:
        # Before it is heard: by the time it is refused another may have taken its place.
        identity = identity_of(paths.door)
        try:
            return await self._open(paths)
        except (NoDonor, Unresponsive) as error:
            # A donor that has ended is no fault. Whatever else listens there is tried at each look.
            ended = isinstance(error, NoDonor) and error.is_vacant
            level = logging.DEBUG if ended or paths.door in self._silent else logging.WARNING
            logger.log(level, "not joined: %s", error)
            if not ended:
                self._silent.add(paths.door)
        except MessageError as error:
            if error.code not in _PASSING_CODES:
                self._discovery.refuse(paths, identity)
            # Donors that others own are no fault, and there may be many.
            level = logging.DEBUG if error.code == ErrorCode.OWNED else logging.WARNING
            logger.log(level, "not joined: %s", error)
        except SwiftCacheError as error:
            self._discovery.refuse(paths, identity)
            logger.warning("not joined: %s", error)
        return None

    async def _open(self, paths: DonorPaths) -> DonorLink:
        """Join the donor at `paths`. Raises SwiftCacheError."""
        self._joining.add(paths.door)
        try:
            any_user = self._discovery.is_named(paths)
            greeting = await greet(
                paths, self._receiver_name, any_user, self._reach, self._settings
            )
            try:
                place = self._take_place(greeting)
            except SwiftCacheError:
                greeting.close()
                raise
            self._silent.discard(paths.door)
            link = self._link(greeting, place.offset)
        finally:
            self._joining.discard(paths.door)
        task = asyncio.create_task(self._run(link, place))
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return link

    def _take_place(self, greeting: Greeting) -> _Place:
        """Addresses for all that a donor could lend. Raises SwiftCacheError."""
        welcome = greeting.welcome
        kind = kind_of(welcome.device, self._reach.device)
        granularity_bytes = self._address_range.window(kind).granularity_bytes
        if welcome.extent_bytes % granularity_bytes:
            raise SwiftCacheError(
                f"the donor at {greeting.paths.spec} lends extents of {welcome.extent_bytes} "
                f"bytes: expected a multiple of {granularity_bytes}; start it with such an "
                f"--extent-size"
            )
        places = self._sub_ranges[kind]
        size_bytes = welcome.extents * welcome.extent_bytes
        return _Place(places, places.take(size_bytes, self._block_bytes, granularity_bytes))

    def _link(self, greeting: Greeting, offset: int) -> DonorLink:
        welcome, settings = greeting.welcome, self._settings
        lent = LentExtents(
            self._address_range,
            offset,
            welcome.extent_bytes,
            welcome.extents,
            settings.mapping_slice_s,
        )
        key = next(self._keys)
        link = DonorLink(key, greeting, lent, self._reach, self._context, settings, self._emit)
        self._emit(
            DonorJoined(
                key,
                welcome.name,
                welcome.device,
                welcome.device_uuid,
                greeting.peer.pid,
                offset,
                welcome.extent_bytes,
                welcome.extents,
                greeting.link,
                welcome.elastic,
            )
        )
        self._links[key] = link
        return link

    async def _run(self, link: DonorLink, place: _Place) -> None:
        try:
            await link.run()
        except Exception:
            # One link must not take the others with it. Its memory stays mapped to the end.
            logger.exception("the link to %s failed", link)
            if link.state is LinkState.JOINED:
                self._emit(DonorLost(link.key, "its link failed"))
        else:
            place.sub_ranges.give_back(place.offset)
        finally:
            self._progress_of_ended += link.progress
            del self._links[link.key]

    def _taken(self) -> set[Path]:
        """Doors of donors that are joined, or being joined, or lost but perhaps still running."""
        return self._joining | {
            link.paths.door
            for link in self._links.values()
            if link.state is LinkState.JOINED or not link.donor_ended
        }


def _sub_ranges(window: Window) -> SubRanges:
    return SubRanges(window.end_bytes - window.start_bytes, window.start_bytes)


async def _granted(attempt: asyncio.Task[DonorLink | None]) -> None:
    """Return once an attempt to join has failed, or brought what memory it will."""
    link = await asyncio.shield(attempt)
    if link is not None:
        await link.settled()
