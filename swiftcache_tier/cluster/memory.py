"""Whether there is memory for the donors of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swiftcache_tier.cluster.config import ClusterFile
from swiftcache_tier.control.door import was_left
from swiftcache_tier.control.lendable import lendable_bytes
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.donor.plan import check_size
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena
from swiftcache_tier.receiver.probe import Question, probe
from swiftcache_tier.settings import GPU_PAGE_BYTES, Settings
from swiftcache_tier.sizes import parse_size


def check_memory(cluster: ClusterFile, runtime_dir: Path) -> None:
    """Raises SwiftCacheError for a donor of plain memory that could not lend what it is to lend.

    Those on one device are counted together. Starts no CUDA driver in this process; blocks for
    `Settings.probe_timeout_s` at most for each GPU that lends.
    """
    settings = Settings.from_env({**os.environ, **cluster.env})
    left_bytes: dict[str, int] = {}
    for name, donor in cluster.donors.items():
        device, size_bytes = donor.device, parse_size(donor.size)
        is_host = device == HostArena.device
        try:
            if device not in left_bytes:
                left_bytes[device] = _available_bytes(device, cluster, runtime_dir, settings)
            check_size(
                device=device,
                size_bytes=size_bytes,
                extent_bytes=settings.extent_bytes,
                granularity_bytes=HostArena.granularity_bytes if is_host else GPU_PAGE_BYTES,
                available_bytes=left_bytes[device],
                settings=settings,
                option="SWIFTCACHE_EXTENT_BYTES",
            )
        except SwiftCacheError as error:
            raise SwiftCacheError(f"donor {name!r}: {error}") from None
        left_bytes[device] -= size_bytes


def _available_bytes(
    device: str, cluster: ClusterFile, runtime_dir: Path, settings: Settings
) -> int:
    if device == HostArena.device:
        available_bytes = lendable_bytes(HostArena(), runtime_dir, settings)
    else:
        (answer,) = probe(device, [Question(device, None)], settings)
        if answer.problem is not None:
            raise SwiftCacheError(answer.problem)
        available_bytes = answer.available_bytes
    names = [name for name, donor in cluster.donors.items() if donor.device == device]
    # Receivers may still hold memory of a donor that was killed: its successor waits for it.
    if any(was_left(donor_paths(runtime_dir, name)) for name in names):
        return sys.maxsize
    return available_bytes
