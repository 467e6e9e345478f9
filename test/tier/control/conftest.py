"""Real donors and receivers for tests of the control plane."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from support.processes import wait_until
from support.raw_memory import peek, poke
from swiftcache_tier.control.messages import StatusReply
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.receiver import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 60.0
POLL_S = 0.005

# Long against what a busy machine does to a process, for tests in which nobody falls silent.
PATIENT = Settings(
    heartbeat_s=0.05,
    lost_after_s=30.0,
    join_timeout_s=30.0,
    reclaim_deadline_s=30.0,
    offer_timeout_s=30.0,
    handshake_timeout_s=15.0,
    status_timeout_s=15.0,
    leave_timeout_s=5.0,
    discovery_interval_s=0.05,
    owned_end_timeout_s=15.0,
    owned_restart_s=0.05,
    extent_bytes=1 << 20,
    address_space_bytes=1 << 30,
    extents_per_message=3,
)


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait until `condition()` is true."""
    wait_until(condition, DEADLINE_S, what, POLL_S)


def environment(settings: Settings) -> dict[str, str]:
    """For child processes, which find the package as this one does."""
    search_path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | settings.as_env() | {"PYTHONPATH": search_path}


class DonorProcess:
    """`swiftcache donor`, as a user starts it."""

    def __init__(
        self, runtime_dir: Path, settings: Settings, name: str, size: str, *flags: str
    ) -> None:
        self.paths: DonorPaths = donor_paths(runtime_dir, name)
        self.settings = settings
        self.log_path = runtime_dir.parent / f"{name}-{time.monotonic_ns()}.log"
        self.ready_line = ""
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "swiftcache_tier", "donor", "--device", "host"),
                    *("--size", size, "--name", name, "--runtime-dir", str(runtime_dir), *flags),
                ],
                env=environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    @property
    def spec(self) -> str:
        return self.paths.spec

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline().decode()
        assert self.ready_line, self.log()

    def log(self) -> str:
        return self.log_path.read_text()

    def status(self) -> StatusReply:
        return query_status(self.paths, self.settings)

    def extents(self, state: str) -> int:
        return self.status().extents[state]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def end_at_once(self) -> None:
        """As somebody does who presses Ctrl-C until it ends."""
        try:
            while self.process.poll() is None:
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(0.1)
        finally:
            self.process.kill()
            self.process.communicate(timeout=DEADLINE_S)


class ReceiverProcess:
    """A receiver in a process of its own; commands are methods of `receiver_process.Receiver`."""

    def __init__(
        self, runtime_dir: Path, settings: Settings, block_bytes: int, name: str, *specs: str
    ) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, str(REPOSITORY / "test/support/receiver_process.py")),
                *(str(runtime_dir), str(block_bytes), name, *specs),
            ],
            env=environment(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def wait_ready(self) -> None:
        assert self._answer() == "ready"

    def __call__(self, command: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Kill it; returns when the donors that it owned have ended too."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        owner = ["--owner-pid", str(self.process.pid)]
        wait_for(lambda: not donors_started_with(*owner), "its own donors end with it")

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the receiver has ended"
        return json.loads(line)


def donors_started_with(*words: str) -> list[psutil.Process]:
    """Donor processes, wherever they are, whose command line has these words in a row."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # zombies have no command line
            line = process.cmdline()
            places = range(len(line) - len(words) + 1)
            if "swiftcache_tier" in line and any(
                line[i:][: len(words)] == [*words] for i in places
            ):
                found.append(process)
    return found


class TierUser:
    """A tier in this process, and what a scheduler would do with it."""

    def __init__(self, tier: DonorTier) -> None:
        self.tier = tier

    def write(self, ids: np.ndarray, value: int) -> None:
        for address in self.tier.addresses(ids):
            poke(int(address), bytes([value]) * self.tier.block_bytes)

    def holds(self, ids: np.ndarray, value: int) -> bool:
        expected = bytes([value]) * self.tier.block_bytes
        return all(
            peek(int(address), self.tier.block_bytes) == expected
            for address in self.tier.addresses(ids)
        )

    def take_all(self) -> np.ndarray:
        ids = self.tier.alloc(self.tier.free_blocks)
        assert ids is not None
        return ids

    def poll_for(self, condition: Callable[[], Any], what: str) -> None:
        """Poll until `condition()` is true."""

        def polled() -> Any:
            self.tier.poll()
            self.tier.check()
            return condition()

        wait_until(polled, DEADLINE_S, what, POLL_S)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A runtime directory with a short name; at the end nothing may be left in it."""
    # Paths of sockets are limited to 107 bytes, and pytest's folders are long.
    parent = Path(tempfile.mkdtemp(prefix="sc-"))
    folder = parent / "rt"
    folder.mkdir(mode=0o700)
    yield folder
    left = sorted(entry.name for entry in folder.iterdir())
    shutil.rmtree(parent)
    assert left == [], "sockets were left behind"


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with private_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def lasting_donor() -> Iterator[DonorProcess]:
    """A donor of two extents for tests that do it no harm."""
    with private_folder() as folder:
        donor = DonorProcess(folder, PATIENT, "lasting", "2MiB")
        donor.wait_ready()
        yield donor
        donor.end_at_once()


@pytest.fixture(scope="module")
def lasting_user(lasting_donor: DonorProcess) -> Iterator[TierUser]:
    """Who holds all of `lasting_donor`."""
    specs = parse_specs(lasting_donor.spec)
    folder = lasting_donor.paths.door.parent
    tier = DonorTier(specs, 1 << 17, settings=PATIENT, runtime_dir=folder, receiver_name="test")
    tier.start()
    yield TierUser(tier)
    tier.close()


@pytest.fixture
def settings() -> Settings:
    return PATIENT


@pytest.fixture
def hasty() -> Settings:
    """For tests in which somebody falls silent, and everybody else is patient enough."""
    return replace(PATIENT, lost_after_s=0.6)


@pytest.fixture
def start_donor(runtime_dir: Path, settings: Settings) -> Iterator[Callable[..., DonorProcess]]:
    """`start_donor(name, size, *flags, settings=, ready=)`; ended with the test."""
    donors: list[DonorProcess] = []
    default = settings

    def start(
        name: str = "a",
        size: str = "4MiB",
        *flags: str,
        settings: Settings = default,
        ready: bool = True,
    ) -> DonorProcess:
        donors.append(DonorProcess(runtime_dir, settings, name, size, *flags))
        if ready:
            donors[-1].wait_ready()
        return donors[-1]

    yield start
    for donor in donors:
        killed = donor.process.poll() == -signal.SIGKILL
        donor.end_at_once()
        if killed:
            for path in donor.paths:
                path.unlink(missing_ok=True)


@pytest.fixture
def start_tier(runtime_dir: Path, settings: Settings) -> Iterator[Callable[..., TierUser]]:
    """`start_tier(*specs, block_bytes=, settings=, device=)` in this process; closed with the
    test."""
    tiers: list[DonorTier] = []
    default = settings

    def start(
        *specs: str,
        block_bytes: int = 1 << 17,
        settings: Settings = default,
        device: str = "cpu",
    ) -> TierUser:
        tier = DonorTier(
            parse_specs(specs),
            block_bytes,
            settings=settings,
            runtime_dir=runtime_dir,
            receiver_name="test",
            device=device,
        )
        tiers.append(tier)
        tier.start()
        return TierUser(tier)

    yield start
    for tier in tiers:
        tier.close()


@pytest.fixture
def start_receiver(
    runtime_dir: Path, settings: Settings
) -> Iterator[Callable[..., ReceiverProcess]]:
    """`start_receiver(name, *specs, block_bytes=, settings=)`; killed with the test."""
    receivers: list[ReceiverProcess] = []
    default = settings

    def start(
        name: str, *specs: str, block_bytes: int = 1 << 17, settings: Settings = default
    ) -> ReceiverProcess:
        receivers.append(ReceiverProcess(runtime_dir, settings, block_bytes, name, *specs))
        receivers[-1].wait_ready()
        return receivers[-1]

    yield start
    for receiver in receivers:
        receiver.end()


@pytest.fixture(name="wait_for")
def _wait_for() -> Callable[[Callable[[], Any], str], None]:
    return wait_for


@pytest.fixture
def child_env() -> Callable[[Settings], dict[str, str]]:
    return environment


@pytest.fixture
def swiftcache(
    runtime_dir: Path, settings: Settings
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `swiftcache` with some arguments to its end."""

    def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swiftcache_tier", *arguments],
            env=environment(settings) | {"SWIFTCACHE_RUNTIME_DIR": str(runtime_dir)} | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    return run


@pytest.fixture
def one_line() -> Callable[[Callable[[], Any]], str]:
    """Call something that must raise SwiftCacheError, and return its one line."""

    def line_of(call: Callable[[], Any]) -> str:
        with pytest.raises(SwiftCacheError) as caught:
            call()
        line = str(caught.value)
        assert "\n" not in line
        return line

    return line_of
