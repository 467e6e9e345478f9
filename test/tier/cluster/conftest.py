"""`swiftcache up` as a user types it, with servers that only look like SGLang's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes import end_tree, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]
FAKE_SGLANG = Path(__file__).resolve().parent / "fake_sglang"
DEADLINE_S = 60.0


class Up:
    """A running `swiftcache up`, its output in files, its servers' records in `folder`."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder

    def said(self) -> str:
        """Its own lines."""
        return (self.folder / "stderr").read_text()

    def forwarded(self) -> list[str]:
        return (self.folder / "stdout").read_text().splitlines()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.said() or self.has_ended, DEADLINE_S, f"it says {text!r}")
        assert text in self.said(), self.said()

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def record(self, port: int) -> dict[str, Any]:
        """What the server on that port was started with, once it is."""
        path = self.folder / f"{port}.json"
        wait_until(lambda: path.exists() and path.read_text(), DEADLINE_S, f"{path.name} is there")
        record: dict[str, Any] = json.loads(path.read_text())
        return record

    def pids(self) -> set[int]:
        """Of all servers that were started, and of what they started."""
        records = [json.loads(path.read_text()) for path in self.folder.glob("*.json")]
        return {pid for record in records for pid in record["pids"]}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    search_path = os.pathsep.join([str(FAKE_SGLANG), str(REPOSITORY)])
    return os.environ | {
        "PYTHONPATH": search_path,
        "SWIFTCACHE_RUNTIME_DIR": str(tmp_path / "runtime"),
        "RECORDS": str(tmp_path),
    }


@pytest.fixture
def swiftcache_up(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run it to its end."""

    def run(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swiftcache_tier", "up", *map(str, words)],
            env=environment | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    return run


@pytest.fixture
def start_up(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[[str], Up]]:
    """Start it with a cluster file of this text; nothing outlives the test."""
    started: list[Up] = []

    def start(text: str) -> Up:
        (tmp_path / "cluster.yaml").write_text(text)
        with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "swiftcache_tier", "up", str(tmp_path / "cluster.yaml")],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        started.append(Up(process, tmp_path))
        return started[-1]

    yield start
    for up in started:
        end_tree(up.process)
        for pid in up.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()


def running(pids: set[int]) -> set[int]:
    """Those that are alive."""
    alive = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
    return alive
