"""What donors could lend a receiver that is about to start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from swiftcache_tier.control.open_files import bytes_at_most
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths_at, list_donors
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import DonorSpec

logger = logging.getLogger(__name__)

AUTO_HOST_SHARE = 0.5
"""Of the host memory that is free, what a server that finds no donor takes for itself."""


def offered_bytes(
    specs: Sequence[DonorSpec], runtime_dir: Path, settings: Settings
) -> tuple[int, ...]:
    """Free bytes, donor by donor, as of now; who comes first gets them.

    Donors that do not answer count as 0. Blocks for `settings.status_timeout_s` for each donor.
    """
    sizes: list[int] = []
    for spec in specs:
        if spec.kind == "ipc":
            assert spec.path is not None
            sizes.append(_free_bytes(donor_paths_at(spec.path), settings))
        elif spec.size_bytes is not None:
            sizes.append(spec.size_bytes)
        else:
            found = [_free_bytes(paths, settings) for paths in list_donors(runtime_dir)]
            if not any(found):
                half = int(HostArena().available_bytes() * AUTO_HOST_SHARE)
                most = min(settings.auto_pinned_bytes_max, bytes_at_most(settings))
                found = [min(half, most)]
            sizes += found
    return tuple(sizes)


def _free_bytes(paths: DonorPaths, settings: Settings) -> int:
    try:
        reply = query_status(paths, settings)
    except SwiftCacheError as error:
        logger.info("memory of %s is not counted: %s", paths.name, error)
        return 0
    if reply.state != "serving" or reply.owner_pid is not None:
        return 0
    return reply.extent_bytes * reply.extents.get(str(LeaseState.FREE), 0)
