"""How much a new donor may promise beside those that run."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swiftcache_tier.control.door import NoDonor
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import DonorPaths, list_donors
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import Arena, HostArena
from swiftcache_tier.settings import Settings

logger = logging.getLogger(__name__)

_ASKED_AT_ONCE = 16


def lendable_bytes(arena: Arena, runtime_dir: Path, settings: Settings) -> int:
    """What `arena` has available, less what donors in the directory may yet take of it.

    Host memory is taken as it is written, so what a donor has promised still counts as available
    to the system. Donors of other directories are not known. Blocks for
    `settings.status_timeout_s`, or a multiple of it if more than 16 donors are stuck.
    """
    available_bytes = arena.available_bytes()
    if arena.device != HostArena.device:
        return available_bytes
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as askers:
        promised = askers.map(lambda paths: _promised(paths, settings), list_donors(runtime_dir))
        return max(0, available_bytes - sum(promised))


def _promised(paths: DonorPaths, settings: Settings) -> int:
    try:
        reply = query_status(paths, settings)
    except NoDonor:
        return 0
    except SwiftCacheError as error:
        logger.info("memory promised by %s is not counted: %s", paths.name, error)
        return 0
    return reply.bytes_untaken if reply.device == HostArena.device else 0
