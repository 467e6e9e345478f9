"""A server that lends: what one of its name left that was killed, and what it leaves itself.

Its donor lives in the scheduler process, which SGLang ends with SIGKILL, also on Ctrl-C, so all
that comes before and after a donor is for the main process. Receivers go on holding memory of a
donor that was killed until they have noticed and vacated it. Its sockets say that it was: left
behind where the main process was killed with it, else replaced by a mark, an empty file.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.swiftcache import donate_checks
from swiftcache_tier.control.door import clear_door, was_left
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.donor.orphans import wait_for_orphans
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena
from swiftcache_tier.receiver.probe import Question, probe
from swiftcache_tier.settings import Settings
from swiftcache_tier.topology import free_memory_bytes, load_nvml

_POLL_S = 0.05


def prepare(args: Any) -> None:
    """Main process, once the flags of a server that lends were checked; nothing is started yet.

    Where a server of its name was killed, waits for the memory that receivers still hold of it: the
    KV pool is sized by what is free. Has the donor's sockets removed when this process ends.

    Raises:
        SwiftCacheError: the CUDA driver does not say which GPU the server is on.
    """
    settings = Settings.from_env()
    paths = _own_donor(args)
    if was_left(paths) or _was_killed_lately(paths, settings):
        wait_for_orphans(paths.name, _memory_of(args, settings), settings)
    with contextlib.suppress(OSError):
        _mark(paths).unlink(missing_ok=True)
    # Callbacks run last in, first out: `Engine` and `Runtime` add theirs, which kill the scheduler,
    # once they have their arguments. `launch_server` kills it before any callback.
    atexit.register(remove_sockets, args, settings)


def remove_sockets(args: Any, settings: Settings) -> None:
    """Put a mark in place of what the donor of a killed scheduler left, once that process is gone.

    Sockets of a server that lives stay. What cannot be removed stays too, for the next server of
    that name to replace.
    """
    # The port as it is by now: a `Runtime` whose port is taken goes on to the next one.
    paths = _own_donor(args)
    end_s = time.monotonic() + settings.scheduler_end_timeout_s
    with contextlib.suppress(OSError, SwiftCacheError):
        while True:
            # Not whether one was killed: it may go between that look and the next line.
            lies_there = paths.door.exists()
            if clear_door(paths, lock_timeout_s=settings.handshake_timeout_s):
                break
            if time.monotonic() > end_s:
                return
            time.sleep(_POLL_S)
        if lies_there:
            _mark(paths).touch(mode=0o600)


def _mark(paths: DonorPaths) -> Path:
    return paths.door.with_name(f"{paths.name}.killed")


def _was_killed_lately(paths: DonorPaths, settings: Settings) -> bool:
    """So lately that receivers may still hold memory of it."""
    try:
        age_s = time.time() - _mark(paths).stat().st_mtime
    except OSError:
        return False
    return age_s <= settings.lost_after_s + settings.reclaim_deadline_s


def _own_donor(args: Any) -> DonorPaths:
    paths = donate_checks.own_donor(args)
    assert paths is not None, "the server does not lend"
    return paths


def _memory_of(args: Any, settings: Settings) -> Callable[[], int]:
    """Reads what is free on the server's device, without a CUDA context in this process."""
    if args.device == "cpu":
        return HostArena().available_bytes
    device = f"cuda:{args.base_gpu_id}"
    (answer,) = probe(device, [Question(device, None)], settings)
    if answer.problem is not None:
        raise SwiftCacheError(answer.problem)
    uuid, nvml = str(answer.uuid), load_nvml()
    # Where NVML cannot tell, nothing is seen to come back, and the wait ends as early as it can.
    return lambda: free_memory_bytes(uuid, nvml) or 0
