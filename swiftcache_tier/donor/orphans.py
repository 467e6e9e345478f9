"""Memory of a donor that was killed, which receivers still hold when its successor starts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)

_POLL_S = 0.2


def wait_for_orphans(
    name: str,
    available_bytes: Callable[[], int],
    settings: Settings,
    *,
    wanted_bytes: int | None = None,
) -> int:
    """What is available once receivers have vacated the memory of `name`, which was killed.

    It outlives the donor, and is in nobody's way but its successor's. Waits for `wanted_bytes`, or,
    where the successor takes whatever there is, until nothing has come back for two heartbeats:
    less than an extent is what other processes do. Gives up after the time that receivers take to
    notice, and to vacate it.
    """
    most_s = settings.lost_after_s + settings.reclaim_deadline_s
    started_s = grew_s = now_s = time.monotonic()
    first_bytes = high_bytes = now_bytes = available_bytes()
    while now_s - started_s <= most_s:
        if now_bytes >= high_bytes + settings.extent_bytes:
            high_bytes, grew_s = now_bytes, now_s
        if wanted_bytes is None:
            is_enough = now_s - grew_s >= 2 * settings.heartbeat_s
        else:
            is_enough = now_bytes >= wanted_bytes
        if is_enough:
            break
        time.sleep(_POLL_S)
        now_s, now_bytes = time.monotonic(), available_bytes()
    logger.info(
        "waited %.1f s for memory of %s, which was killed, that receivers still held: %s came "
        "back, %s are available",
        now_s - started_s,
        name,
        format_size(max(0, now_bytes - first_bytes)),
        format_size(now_bytes),
    )
    return now_bytes
