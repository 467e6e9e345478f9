"""Donors that a receiver starts for itself, and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import IO

from swiftcache_tier.control.door import leave_door
from swiftcache_tier.control.records import process_end, readable
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)

_READ_BYTES = 4096


def owned_donor_paths(device: str, runtime_dir: Path) -> DonorPaths:
    """Where a new donor that this process owns will be found. Raises SwiftCacheError."""
    name = f"{device.replace(':', '')}-of-{os.getpid()}-{secrets.token_hex(2)}"
    return donor_paths(runtime_dir, name)


class OwnedDonor:
    """A donor process that serves this process alone, and ends with it in any case.

    Used on the event loop's thread.
    """

    def __init__(self, device: str, size_bytes: int, paths: DonorPaths, settings: Settings) -> None:
        """Start it. Less than one extent of the usual size is lent as one smaller extent."""
        self._what = f"own donor {paths.name} of {format_size(size_bytes)} on {device}"
        self._paths = paths
        self._settings = settings
        self._last_line = ""
        self._ending = False
        page_bytes = os.sysconf("SC_PAGESIZE")
        extent_bytes = min(settings.extent_bytes, size_bytes // page_bytes * page_bytes)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "swiftcache_tier", "donor"),
                *("--device", device),
                *("--size", str(size_bytes)),
                *("--extent-size", str(extent_bytes)),
                *("--name", paths.name),
                *("--runtime-dir", str(paths.door.parent)),
                *("--owner-pid", str(os.getpid())),
            ],
            env=os.environ | settings.as_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C at the terminal is for the owner, which ends its donors when it is done.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdout = self._process.stdout
        self._log = asyncio.create_task(self._forward(self._process.stderr))
        self._over = asyncio.create_task(self._reap(os.pidfd_open(self._process.pid)))

    async def ready(self) -> None:
        """Return once it can be joined. Raises SwiftCacheError with its words if it ended."""
        await readable(self._stdout.fileno())
        if not os.read(self._stdout.fileno(), _READ_BYTES):
            await self._log
            raise SwiftCacheError(
                f"{self._what} did not start: {self._last_line or 'it ended without a word'}"
            )

    async def end(self) -> None:
        """End the process: asked first, killed after `owned_end_timeout_s`."""
        self._ending = True
        if not self._over.done():
            self._process.terminate()
            await asyncio.wait([self._over], timeout=self._settings.owned_end_timeout_s)
        if not self._over.done():
            logger.error(
                "%s has not ended for %.1f s: killed",
                self._what,
                self._settings.owned_end_timeout_s,
            )
            self._process.kill()
        await asyncio.gather(self._over, self._log)
        self._stdout.close()

    async def _reap(self, pidfd: int) -> None:
        try:
            await process_end(pidfd)
        finally:
            os.close(pidfd)
        status = self._process.wait()
        leave_door(self._paths)  # nobody else's: the name is ours alone
        if not self._ending:
            logger.error("%s has ended by itself with status %d", self._what, status)

    async def _forward(self, stderr: IO[bytes]) -> None:
        """Put what the donor logs into this process's log, to the end of it."""
        pending = b""
        with stderr:
            while True:
                await readable(stderr.fileno())
                data = os.read(stderr.fileno(), _READ_BYTES)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._last_line = line.decode(errors="replace").removeprefix("swiftcache: ")
                    logger.info("%s", self._last_line)
