"""All donors of a receiver: joined as asked, found, joined again, left."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq.asyncio

from swiftcache_tier.blocks import SubRanges
from swiftcache_tier.control.door import NoDonor
from swiftcache_tier.control.messages import ErrorCode, MessageError
from swiftcache_tier.control.query import Unresponsive
from swiftcache_tier.control.runtime_dir import (
    DonorPaths,
    donor_paths_of_spec,
    ensure_runtime_dir,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import AddressRange, HostArena
from swiftcache_tier.memory import available_host_bytes
from swiftcache_tier.receiver.discovery import Discovery
from swiftcache_tier.receiver.events import DonorJoined, DonorLost, Event
from swiftcache_tier.receiver.greeting import greet
from swiftcache_tier.receiver.lent import LentExtents
from swiftcache_tier.receiver.link import DonorLink, LinkState
from swiftcache_tier.receiver.owned import OwnedDonor, owned_donor_paths
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import DonorSpec

logger = logging.getLogger(__name__)

# What may be otherwise at the next look; anything else a donor says stays so while it runs.
_PASSING_CODES = (ErrorCode.FULL, ErrorCode.DRAINING)


class Links:
    """Used by the control thread, on its loop."""

    def __init__(
        self,
        *,
        block_bytes: int,
        address_range: AddressRange,
        settings: Settings,
        runtime_dir: Path,
        receiver_name: str,
        emit: Callable[[Event], None],
    ) -> None:
        self._block_bytes = block_bytes
        self._address_range = address_range
        self._settings = settings
        self._runtime_dir = runtime_dir
        self._receiver_name = receiver_name
        self._emit = emit
        self._context = zmq.asyncio.Context()
        self._sub_ranges = SubRanges(address_range.size_bytes)
        self._discovery = Discovery()
        self._keys = itertools.count(1)
        self._links: dict[int, DonorLink] = {}
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._attempts: set[asyncio.Task[DonorLink | None]] = set()
        self._joining: set[Path] = set()
        self._owned: list[OwnedDonor] = []

    def link(self, key: int) -> DonorLink | None:
        """The link of that key, until it is over; may be called from any thread."""
        return self._links.get(key)

    async def join(self, specs: Sequence[DonorSpec]) -> None:
        """Return once every SPEC has granted memory. Raises SwiftCacheError for one that did not
        within `join_timeout_s`; the others may be joined then."""
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
        for link in self._links.values():
            link.leave()
        if self._link_tasks:
            await asyncio.wait(self._link_tasks, timeout=self._settings.leave_timeout_s)
        for task in self._link_tasks:
            task.cancel()
        await asyncio.gather(*self._link_tasks, return_exceptions=True)
        await asyncio.gather(*(donor.end() for donor in self._owned))
        self._context.destroy(linger=0)

    async def _satisfy(self, spec: DonorSpec, deadline_s: float) -> None:
        match spec.kind:
            case "auto":
                await self._join_found(deadline_s)
            case "ipc":
                assert spec.path is not None
                paths = donor_paths_of_spec(spec.path)
                self._discovery.watch(paths)
                await self._require(await self._open(paths), str(spec), deadline_s)
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
            await asyncio.wait(grants, timeout=patience_s)
            for grant in grants:
                grant.cancel()
        if any(link.lent.held for link in self._links.values()):
            return
        size_bytes = available_host_bytes() // 2
        logger.info(
            "no donor in %s gives memory: starting one of %s of host memory, half of what is free",
            self._runtime_dir,
            format_size(size_bytes),
        )
        await self._start_own(HostArena.device, size_bytes, "auto", deadline_s)

    async def _start_own(self, device: str, size_bytes: int, spec: str, deadline_s: float) -> None:
        ensure_runtime_dir(self._runtime_dir)
        paths = owned_donor_paths(device, self._runtime_dir)
        self._joining.add(paths.door)
        donor = OwnedDonor(device, size_bytes, paths, self._settings)
        self._owned.append(donor)
        try:
            async with asyncio.timeout_at(deadline_s):
                await donor.ready()
        except TimeoutError:
            raise SwiftCacheError(
                f"donor SPEC {spec}: the donor did not start within "
                f"{self._settings.join_timeout_s:g} s; raise SWIFTCACHE_JOIN_TIMEOUT_S if this "
                f"machine is slow"
            ) from None
        await self._require(await self._open(paths), spec, deadline_s)

    async def _require(self, link: DonorLink, spec: str, deadline_s: float) -> None:
        """Wait for all that the donor means to grant; raise SwiftCacheError if it is nothing."""
        try:
            async with asyncio.timeout_at(deadline_s):
                await link.settled()
        except TimeoutError:
            if link.lent.held:
                logger.warning(
                    "donor SPEC %s: %d extents so far, more may come", spec, link.lent.held
                )
        if link.lent.held == 0:
            raise SwiftCacheError(
                f"donor SPEC {spec}: granted no memory within {self._settings.join_timeout_s:g} s: "
                f"see who holds it with `swiftcache status`, or name another donor"
            )

    def _attempt(self, paths: DonorPaths) -> asyncio.Task[DonorLink | None]:
        """Try to join; what stands against it is logged."""
        self._joining.add(paths.door)
        attempt = asyncio.create_task(self._try_to_open(paths))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)
        return attempt

    async def _try_to_open(self, paths: DonorPaths) -> DonorLink | None:
        try:
            return await self._open(paths)
        except (NoDonor, Unresponsive) as error:
            logger.debug("not joined: %s", error)
        except MessageError as error:
            if error.code not in _PASSING_CODES:
                self._discovery.refuse(paths)
            # Donors that others own are no fault, and there may be many.
            level = logging.DEBUG if error.code == ErrorCode.OWNED else logging.WARNING
            logger.log(level, "not joined: %s", error)
        except SwiftCacheError as error:
            self._discovery.refuse(paths)
            logger.warning("not joined: %s", error)
        return None

    async def _open(self, paths: DonorPaths) -> DonorLink:
        """Join the donor at `paths`. Raises SwiftCacheError."""
        self._joining.add(paths.door)
        try:
            any_user = self._discovery.is_named(paths)
            greeting = await greet(paths, self._receiver_name, any_user, self._settings)
            welcome = greeting.welcome
            try:
                offset = self._sub_ranges.take(
                    welcome.extents * welcome.extent_bytes,
                    self._block_bytes,
                    HostArena.granularity_bytes,
                )
            except SwiftCacheError:
                greeting.close()
                raise
            key = next(self._keys)
            lent = LentExtents(self._address_range, offset, welcome.extent_bytes, welcome.extents)
            link = DonorLink(key, greeting, lent, self._context, self._settings, self._emit)
            self._emit(
                DonorJoined(
                    key,
                    welcome.name,
                    welcome.device,
                    greeting.peer.pid,
                    offset,
                    welcome.extent_bytes,
                    welcome.extents,
                    greeting.rank,
                )
            )
            self._links[key] = link
        finally:
            self._joining.discard(paths.door)
        task = asyncio.create_task(self._run(link, offset))
        self._link_tasks.add(task)
        task.add_done_callback(self._link_tasks.discard)
        return link

    async def _run(self, link: DonorLink, offset: int) -> None:
        try:
            await link.run()
        except Exception:
            # One link must not take the others with it. Its memory stays mapped to the end.
            logger.exception("the link to %s failed", link)
            self._emit(DonorLost(link.key, "its link failed"))
        else:
            self._sub_ranges.give_back(offset)
        finally:
            del self._links[link.key]

    def _taken(self) -> set[Path]:
        """Doors of donors that are joined, or being joined, or lost but perhaps still running."""
        return self._joining | {
            link.paths.door
            for link in self._links.values()
            if link.state is LinkState.JOINED or not link.donor_ended
        }


async def _granted(attempt: asyncio.Task[DonorLink | None]) -> None:
    """Return once an attempt to join has failed, or brought what memory it will."""
    link = await asyncio.shield(attempt)
    if link is not None:
        await link.settled()
