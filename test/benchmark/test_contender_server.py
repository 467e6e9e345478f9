"""Starting and ending what is measured: real processes, a fake server in place of SGLang."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes import free_port, wait_until
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.server import contender_server
from swiftcache_bench.server.api import server_info
from swiftcache_bench.server.contender_server import ContenderServer, LaunchSettings
from swiftcache_bench.server.contenders import Contender
from swiftcache_bench.server.processes import ProcessTree, port_is_free
from swiftcache_tier.spec import DonorSpec

FAKE = Path(__file__).with_name("fake_server.py")
SLEEP = [sys.executable, "-c", "import time; time.sleep(3600)"]
DONOR_FLAGS = ("--swiftcache-donors", "auto", "--swiftcache-runtime-dir", "{runtime_dir}")


@pytest.fixture
def launch(tmp_path: Path) -> LaunchSettings:
    return LaunchSettings(
        model_path="some-model",
        port=free_port(),
        log_dir=tmp_path,
        common_flags=("--page-size", "16"),
        launch=(sys.executable, str(FAKE)),
        start_timeout_s=60.0,
        stop_grace_s=5.0,
        port_free_timeout_s=5.0,
    )


@pytest.fixture
def other_server() -> Iterator[int]:
    """The port of somebody else's listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def pids_of(server: ContenderServer) -> list[int]:
    assert server._server is not None
    return [process.pid for process in server._server.members()]


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_a_contender_answers_with_its_own_flags_and_is_gone_afterwards(
    launch: LaunchSettings,
) -> None:
    contender = Contender("mine", ("--hicache-io-backend", "kernel"))
    with ContenderServer(contender, launch) as server:
        server.start()
        info = server.check()
        assert info["page_size"] == "16"
        assert info["hicache_io_backend"] == "kernel"
        assert server.flag_check is not None
        assert set(server.flag_check.confirmed) == {"--page-size", "--hicache-io-backend"}
        pids = pids_of(server)
        assert pids
    assert gone(pids)
    assert port_is_free(launch.port)


def test_children_are_ended_too(launch: LaunchSettings, tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    with ContenderServer(Contender("mine", ("--fake-child", str(child_file))), launch) as server:
        server.start()
        child = int(child_file.read_text())
        assert psutil.pid_exists(child)
    assert gone([child])


def test_one_contender_after_the_other_has_the_same_port(launch: LaunchSettings) -> None:
    marks = []
    for name in ("one", "two"):
        with ContenderServer(Contender(name), launch) as server:
            server.start()
            marks.append(server_info(server.url)["weight_version"])
    assert marks[0] != marks[1]


def test_a_taken_port_stops_the_contender_and_leaves_its_owner_alone(
    launch: LaunchSettings, other_server: int
) -> None:
    settings = LaunchSettings("some-model", other_server, launch.log_dir, launch=launch.launch)
    with (
        ContenderServer(Contender("mine"), settings) as server,
        pytest.raises(BenchmarkError, match=f"port {other_server} is taken"),
    ):
        server.start()
    assert not port_is_free(other_server)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--fake-exit",), "exit code 3.*gives up"),
        (("--fake-mark", "bench-somebody"), "another server answers"),
        (
            ("--hicache-io-backend", "kernel", "--fake-change", "hicache_io_backend=direct"),
            "asked for --hicache-io-backend kernel, but the server runs direct",
        ),
    ],
)
def test_a_server_that_is_not_what_was_asked_for_is_not_measured(
    launch: LaunchSettings, flags: tuple[str, ...], says: str
) -> None:
    with (
        ContenderServer(Contender("mine", flags), launch) as server,
        pytest.raises(BenchmarkError, match=says) as caught,
    ):
        server.start()
    assert "\n" not in str(caught.value)
    assert port_is_free(launch.port)


def test_a_shared_flag_that_was_changed_is_kept_for_the_report(launch: LaunchSettings) -> None:
    contender = Contender("mine", ("--fake-change", "page_size=64"))
    with ContenderServer(contender, launch) as server:
        server.start()
        assert server.flag_check is not None
        assert server.flag_check.differing == (("--page-size", "16", "64"),)


def test_a_server_that_died_is_noticed(launch: LaunchSettings) -> None:
    with ContenderServer(Contender("mine"), launch) as server:
        server.start()
        (pid, *_) = pids_of(server)
        os.kill(pid, 9)
        wait_until(lambda: server._server.exit_code is not None, 10, "the server has ended")
        with pytest.raises(BenchmarkError, match="exit code -9"):
            server.check()


def test_a_server_that_does_not_come_up_is_given_up(launch: LaunchSettings) -> None:
    settings = LaunchSettings(
        "some-model", launch.port, launch.log_dir, launch=tuple(SLEEP), start_timeout_s=0.5
    )
    with (
        ContenderServer(Contender("mine"), settings) as server,
        pytest.raises(BenchmarkError, match=r"not ready after 0\.5 s"),
    ):
        server.start()


# -- donors -----------------------------------------------------------------------------------


@pytest.fixture
def with_donor() -> Contender:
    return Contender("swift", DONOR_FLAGS, (DonorSpec.parse("host=64MiB"),))


def test_donors_are_up_before_the_server_and_gone_after_it(
    launch: LaunchSettings, with_donor: Contender
) -> None:
    with ContenderServer(with_donor, launch) as server:
        server.start()
        assert server._donors is not None
        (donor,) = server._donors._running
        assert donor.exit_code is None
        assert server.check()["swiftcache_runtime_dir"] == str(server._runtime_dir)
        pids = [process.pid for process in donor.members()]
        runtime_dir = server._runtime_dir
    assert gone(pids)
    assert not runtime_dir.exists()


def test_a_donor_that_cannot_start_stops_the_contender(
    launch: LaunchSettings, with_donor: Contender
) -> None:
    settings = LaunchSettings(
        "some-model",
        launch.port,
        launch.log_dir,
        launch=launch.launch,
        swiftcache=(sys.executable, str(FAKE), "--fake-exit"),
    )
    with (
        ContenderServer(with_donor, settings) as server,
        pytest.raises(BenchmarkError, match="donor bench-0 ended with exit code 3"),
    ):
        server.start()
    assert server._server is None


def test_a_server_that_does_not_use_its_donors_is_not_measured(
    launch: LaunchSettings, with_donor: Contender
) -> None:
    contender = Contender("swift", DONOR_FLAGS, with_donor.donors, {"FAKE_NO_DONORS": "1"})
    with (
        ContenderServer(contender, launch) as server,
        pytest.raises(BenchmarkError, match="does not use donors bench-0"),
    ):
        server.start()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"internal_states": [{"swiftcache": {"donors": []}}]}, "does not use donors bench-0"),
        ({"swiftcache_donors": None}, "asked for --swiftcache-donors auto"),
    ],
)
def test_a_server_that_has_lost_what_was_asked_for_is_noticed_after_a_run(
    launch: LaunchSettings,
    with_donor: Contender,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    says: str,
) -> None:
    with ContenderServer(with_donor, launch) as server:
        server.start()
        server.check()
        monkeypatch.setattr(contender_server, "server_info", lambda url: server_info(url) | changed)
        with pytest.raises(BenchmarkError, match=says):
            server.check()


def test_a_donor_that_died_is_noticed(launch: LaunchSettings, with_donor: Contender) -> None:
    with ContenderServer(with_donor, launch) as server:
        server.start()
        assert server._donors is not None
        (donor,) = server._donors._running
        os.kill(donor.pid, 9)
        wait_until(lambda: donor.exit_code is not None, 10, "the donor has ended")
        with pytest.raises(BenchmarkError, match="donor bench-0 ended"):
            server.check()


# -- a tree of processes ----------------------------------------------------------------------

ORPHANING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
"""


def test_a_process_whose_parent_has_ended_is_ended_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tree = ProcessTree([sys.executable, "-c", ORPHANING], log)
    wait_until(lambda: tree.exit_code is not None, 20, "the parent has ended")
    child = int(log.read_text())
    assert psutil.pid_exists(child)
    tree.end(grace_s=1.0)
    assert gone([child])
    tree.end(grace_s=1.0)


CRASHING = """
print("starting", flush=True)
try:
    raise RuntimeError("no driver")
finally:
    import atexit
    atexit.register(print, "killing all")
"""


def test_a_failure_names_the_exception_in_the_log(tmp_path: Path) -> None:
    tree = ProcessTree([sys.executable, "-c", CRASHING], tmp_path / "log")
    wait_until(lambda: tree.exit_code is not None, 20, "the process has ended")
    message = str(tree.failure("it ended"))
    assert "RuntimeError: no driver" in message
    assert "killing all" in (tmp_path / "log").read_text()
    assert "\n" not in message


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(3600)
"""


def test_a_process_that_ignores_the_first_signal_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tree = ProcessTree([sys.executable, "-c", STUBBORN], log)
    wait_until(lambda: "ready" in log.read_text(), 20, "the process is up")
    tree.end(grace_s=0.2)
    assert tree.exit_code == -9
