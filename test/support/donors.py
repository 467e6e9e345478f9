"""A standalone donor for a test: `swiftcache donor` as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from support.processes import wait_until

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 30.0


class Donor:
    """``swiftcache donor`` in a runtime directory, as a context manager."""

    def __init__(
        self,
        runtime_dir: Path,
        name: str,
        *,
        size: str = "8MiB",
        extent_size: str = "256KiB",
        device: str = "host",
        **env: str,
    ) -> None:
        """``env``: variables that are added to this process's environment."""
        self.runtime_dir = runtime_dir
        self.name = name
        self._log = runtime_dir.parent / f"donor-{name}.log"
        command = [sys.executable, "-m", "swiftcache_tier", "donor", "--device", device]
        command += ["--size", size, "--extent-size", extent_size, "--name", name]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--runtime-dir", str(runtime_dir)],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        wait_until(
            lambda: f"swiftcache donor {self.name}:" in self.log() or self._ended(),
            START_DEADLINE_S,
            f"donor {self.name} is ready",
        )
        assert not self._ended(), self.log()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._ended():
            self.process.kill()
        self.process.wait(STOP_DEADLINE_S)

    @property
    def spec(self) -> str:
        return f"ipc://{self.runtime_dir / self.name}"

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def leave(self) -> int:
        """As on Ctrl-C: it takes its memory back and ends. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_DEADLINE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_DEADLINE_S)

    def overwrite_memory(self, byte: int = 0) -> int:
        """Fill all of the donor's extents, from outside; returns their number."""
        written = 0
        folder = Path(f"/proc/{self.process.pid}/fd")
        for link in folder.iterdir():
            if os.readlink(link).startswith("/memfd:"):
                with link.open("r+b") as extent:
                    extent.write(bytes([byte]) * os.fstat(extent.fileno()).st_size)
                written += 1
        return written

    def memory_is_zero(self) -> bool:
        """Whether every byte of the donor's extents is zero, read from outside."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        for link in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # the donor has just closed it
                if os.readlink(link).startswith("/memfd:"):
                    with link.open("rb") as extent:
                        if any(extent.read()):
                            return False
        return True

    def _ended(self) -> bool:
        return self.process.poll() is not None
