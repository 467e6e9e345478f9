"""What a donor will lend, checked before anything is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftcache_tier.control.credentials import uids_of
from swiftcache_tier.control.door import was_left
from swiftcache_tier.control.lendable import lendable_bytes
from swiftcache_tier.control.open_files import require_open_files
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths, ensure_runtime_dir
from swiftcache_tier.donor.orphans import wait_for_orphans
from swiftcache_tier.donor.owner import Owner
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Arena, arena_for
from swiftcache_tier.extents.pool_memory import PoolMemory
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size


@dataclass(frozen=True)
class DonorPlan:
    """A donor that can be started."""

    arena: Arena
    paths: DonorPaths
    extent_bytes: int
    extents: int
    allowed_uids: frozenset[int]
    """Whose processes may borrow: this user's, root's, and those allowed by name."""
    owner: Owner | None
    """The one process that may borrow, and whose end ends the donor."""
    open_files: int
    """What the limit on open files must at least be."""

    @property
    def size_bytes(self) -> int:
        return self.extents * self.extent_bytes

    @property
    def others_allowed(self) -> bool:
        return not self.allowed_uids <= {os.geteuid(), 0}


def plan_donor(
    *,
    device: str,
    size_bytes: int,
    name: str | None,
    runtime_dir: Path,
    extent_bytes: int | None,
    allow_users: Sequence[str],
    owner: Owner | None,
    settings: Settings,
) -> DonorPlan:
    """Check what a user asked for; `size_bytes` is rounded down to whole extents.

    Makes the runtime directory and nothing else. Raises SwiftCacheError for what cannot be.
    """
    arena = arena_for(device)
    if extent_bytes is None:
        extent_bytes = settings.extent_bytes
    available_bytes = lendable_bytes(arena, runtime_dir, settings)
    if name is not None and size_bytes > available_bytes:
        paths = donor_paths(runtime_dir, name)
        if was_left(paths):
            available_bytes = wait_for_orphans(
                paths.name,
                lambda: lendable_bytes(arena, runtime_dir, settings),
                settings,
                wanted_bytes=size_bytes,
            )
    extents, open_files = check_size(
        device=device,
        size_bytes=size_bytes,
        extent_bytes=extent_bytes,
        granularity_bytes=arena.granularity_bytes,
        available_bytes=available_bytes,
        settings=settings,
        # Whoever has a server start its own donor sets no options of that.
        option="--extent-size" if owner is None else "SWIFTCACHE_EXTENT_BYTES",
    )
    allowed_uids = frozenset({os.geteuid(), 0}) | uids_of(allow_users)
    ensure_runtime_dir(runtime_dir)
    paths = donor_paths(
        runtime_dir, f"{device.replace(':', '')}-{os.getpid()}" if name is None else name
    )
    return DonorPlan(arena, paths, extent_bytes, extents, allowed_uids, owner, open_files)


def check_size(
    *,
    device: str,
    size_bytes: int,
    extent_bytes: int,
    granularity_bytes: int,
    available_bytes: int,
    settings: Settings,
    option: str,
) -> tuple[int, int]:
    """How many extents a donor of `size_bytes` has, and open files.

    `available_bytes`: what the device has to give. `option`: sets the size of an extent. Raises
    SwiftCacheError for sizes that do not fit the device, each other or the limits.
    """
    if extent_bytes % granularity_bytes or extent_bytes == 0:
        raise SwiftCacheError(
            f"extent size of {extent_bytes} bytes: expected a positive multiple of "
            f"{granularity_bytes} bytes for device {device}; set --extent-size or "
            f"SWIFTCACHE_EXTENT_BYTES, as in 64MiB"
        )
    extents = size_bytes // extent_bytes
    if extents == 0:
        raise SwiftCacheError(
            f"size {format_size(size_bytes)} is less than one extent: lend at least "
            f"{format_size(extent_bytes)}, or choose smaller extents with {option}"
        )
    if size_bytes > available_bytes:
        raise SwiftCacheError(
            f"size {format_size(size_bytes)} is over what device {device} has to give: "
            f"{format_size(available_bytes)} is available now, beyond what other donors have "
            f"promised; lend less or free some"
        )
    return extents, require_open_files(
        extents, extent_bytes, settings, option=option, for_extents=extents
    )


def plan_pool_donor(memory: PoolMemory, paths: DonorPaths, settings: Settings) -> DonorPlan:
    """The donor of a serving engine whose KV pool lies in `memory`, for its own user's processes.

    Makes the runtime directory and nothing else. Raises SwiftCacheError for one that is unsafe, and
    for more extents than may be open.
    """
    open_files = require_open_files(
        memory.extents,
        memory.extent_bytes,
        settings,
        option="SWIFTCACHE_EXTENT_BYTES",
        for_extents=memory.open_files,
    )
    ensure_runtime_dir(paths.door.parent)
    return DonorPlan(
        arena=memory.arena,
        paths=paths,
        extent_bytes=memory.extent_bytes,
        extents=memory.extents,
        allowed_uids=frozenset({os.geteuid(), 0}),
        owner=None,
        open_files=open_files,
    )
