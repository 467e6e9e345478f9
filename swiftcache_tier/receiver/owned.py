"""Donors that a receiver starts for itself, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
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
_REFUSAL = "swiftcache: "
"""What the line begins with in which a donor says why it ends."""


def owned_donor_paths(device: str, runtime_dir: Path) -> DonorPaths:
    """Where a new donor that this process owns will be found. Raises SwiftCacheError."""
    name = f"{device.replace(':', '')}-of-{os.getpid()}-{secrets.token_hex(2)}"
    return donor_paths(runtime_dir, name)


def owned_extent_bytes(size_bytes: int, granularity_bytes: int, settings: Settings) -> int:
    """Of a donor of that size: the usual, or one smaller extent where that is more.

    `granularity_bytes`: what extents of its device are multiples of.
    """
    extent_bytes = min(settings.extent_bytes, size_bytes)
    return max(extent_bytes // granularity_bytes, 1) * granularity_bytes


class OwnedDonor:
    """A donor process that serves this process alone, and ends with it in any case.

    It is no child of this process: servers end by SIGKILL for their whole tree, and the donor is to
    outlive that by the moment it takes to remove its sockets. Used on the event loop's thread.
    """

    def __init__(
        self,
        device: str,
        size_bytes: int,
        granularity_bytes: int,
        paths: DonorPaths,
        settings: Settings,
    ) -> None:
        """Start it, with extents of `owned_extent_bytes`.

        Raises SwiftCacheError when there can be no process.
        """
        self.what = f"own donor {paths.name} of {format_size(size_bytes)} on {device}"
        """For log lines and errors."""
        self._paths = paths
        self._settings = settings
        self._last_line = ""
        self._refusal = ""
        self._serves = False
        self._ending = False
        extent_bytes = owned_extent_bytes(size_bytes, granularity_bytes, settings)
        command = [
            *(sys.executable, "-m", "swiftcache_tier", "donor"),
            *("--device", device),
            *("--size", str(size_bytes)),
            *("--extent-size", str(extent_bytes)),
            *("--name", paths.name),
            *("--runtime-dir", str(paths.door.parent)),
            *("--owner-pid", str(os.getpid())),
        ]
        try:
            # Ends as soon as it has started the donor, in the background (--owner-pid).
            self._starter = subprocess.Popen(
                command,
                env=os.environ | settings.as_env(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C at the terminal is for the owner, which ends its donors when it is done.
                start_new_session=True,
            )
        except OSError as error:
            raise self._not_started(str(error)) from error
        assert self._starter.stdout is not None
        assert self._starter.stderr is not None
        self._stdout = self._starter.stdout
        self._pidfd: int | None = None
        self._started = asyncio.create_task(self._wait_started())
        self._log = asyncio.create_task(self._forward(self._starter.stderr))
        self._over = asyncio.create_task(self._wait_over())

    async def ready(self, deadline_s: float) -> None:
        """Return once it can be joined. Raises SwiftCacheError, with its words if it ended.

        `deadline_s`: of the loop's clock.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.shield(self._started)
                await readable(self._stdout.fileno())
        except TimeoutError:
            raise self._not_started(
                f"not within {self._settings.join_timeout_s:g} s; raise SWIFTCACHE_JOIN_TIMEOUT_S "
                f"if this machine is slow"
            ) from None
        except OSError as error:
            raise self._not_started(str(error)) from error
        if not os.read(self._stdout.fileno(), _READ_BYTES):
            await asyncio.wait([self._log])
            words = self._refusal or self._last_line
            raise self._not_started(words or "it ended without a word")
        self._serves = True

    async def over(self) -> None:
        """Return once the process has ended and its sockets are removed."""
        await asyncio.wait([self._over])

    async def end(self) -> None:
        """End the process: asked first, killed after `owned_end_timeout_s`. May be repeated."""
        self._ending = True
        patience_s = self._settings.owned_end_timeout_s
        await asyncio.wait([self._started], timeout=patience_s)
        self._signal(signal.SIGTERM)
        await asyncio.wait([self._over], timeout=patience_s)
        if not self._over.done():
            logger.error("%s has not ended for %.1f s: killed", self.what, patience_s)
            self._starter.kill()
            self._signal(signal.SIGKILL)
        await asyncio.wait([self._over, self._log])
        self._stdout.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _not_started(self, why: str) -> SwiftCacheError:
        return SwiftCacheError(f"{self.what} did not start: {why}")

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                signal.pidfd_send_signal(self._pidfd, number)

    async def _wait_started(self) -> None:
        """Wait for the end of the process that starts the donor, and find the donor."""
        starter_pidfd = os.pidfd_open(self._starter.pid)
        try:
            await process_end(starter_pidfd)
        finally:
            os.close(starter_pidfd)
        if self._starter.wait() == 0:
            # The starter's line comes first: the donor says nothing before the starter's end.
            pid = int(_read_line(self._stdout.fileno()))
            with contextlib.suppress(ProcessLookupError):  # it has ended
                self._pidfd = os.pidfd_open(pid)

    async def _wait_over(self) -> None:
        await asyncio.shield(self._started)
        if self._pidfd is not None:
            await process_end(self._pidfd)
            with contextlib.suppress(ChildProcessError):
                # A child after all where this process adopts orphans, as the first of a container.
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        leave_door(self._paths)  # nobody else's: the name is ours alone
        if self._serves and not self._ending:
            await asyncio.wait([self._log])
            why = f": {self._refusal}" if self._refusal else ""
            logger.error("%s has ended by itself%s", self.what, why)

    async def _forward(self, stderr: IO[bytes]) -> None:
        """Put what the donor logs into this process's log, to the end of it.

        Why it ends is left to whoever tells of that.
        """
        pending = b""
        with stderr:
            while True:
                await readable(stderr.fileno())
                data = os.read(stderr.fileno(), _READ_BYTES)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._last_line = line.decode(errors="replace")
                    if self._last_line.startswith(_REFUSAL):
                        self._refusal = self._last_line.removeprefix(_REFUSAL)
                    else:
                        logger.info("%s", self._last_line)


def _read_line(descriptor: int) -> bytes:
    """Read to the end of a line, and no further."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line
