"""`swiftcache donor` and `swiftcache status`, as they are typed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest


def test_help_names_the_subcommands(swiftcache: Any) -> None:
    done = swiftcache("--help")
    assert done.returncode == 0
    assert "donor" in done.stdout
    assert "status" in done.stdout


@pytest.mark.parametrize("words", [[], ["lend"], ["status", "--yaml"], ["status", "a\nb"]])
def test_what_is_no_command_is_said_in_one_line(swiftcache: Any, words: list[str]) -> None:
    done = swiftcache(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("swiftcache: ")
    assert done.stderr.count("\n") == 1
    assert "--help" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exporter", "--port", "x"], ["--port: 'x': expected a port, 1 to 65535"]),
        (["exporter", "--port", "70000"], ["--port: '70000': expected a port"]),
        (["exporter", "--host", "a..b"], ["cannot listen on a..b:9090", "--host"]),
        (["top", "--interval", "x"], ["--interval x", "see swiftcache top --help"]),
        (["plan", "--pairs", "--context", "0"], ["--context: '0': expected a whole number"]),
        (["donor", "--owner-pid", "me"], ["--owner-pid: 'me': expected a whole number"]),
        (["drain", "a", "--wait", "long"], ["--wait: 'long': expected seconds"]),
        (["status", "--runtime-dir", ""], ["--runtime-dir: '': expected a folder", "default"]),
        (["limit", "a", "little"], ["SIZE: 'little' is not a size", "40GiB"]),
    ],
)
def test_values_that_are_none_are_said_in_one_line(
    swiftcache: Any, words: list[str], said: list[str]
) -> None:
    done = swiftcache(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("swiftcache: ")
    assert done.stderr.count("\n") == 1
    for word in said:
        assert word in done.stderr


def test_a_port_that_is_taken_is_said_in_one_line(swiftcache: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = swiftcache("exporter", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"swiftcache: cannot listen on 127.0.0.1:{port} (")
    assert "choose another with --port" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_starts_light_and_with_one_thread(child_env: Any, settings: Any) -> None:
    """A donor that is owned forks, which a process of several threads must not."""
    script = (
        "import os, sys, swiftcache_tier.cli\n"
        "print({'torch', 'numpy', 'cuda.bindings.driver'} & set(sys.modules),"
        " len(os.listdir('/proc/self/task')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=child_env(settings),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "set() 1\n"


def test_a_donor_says_in_one_line_that_it_is_ready(start_donor: Any) -> None:
    donor = start_donor("gpu-box.1", "2.5MiB")
    assert donor.ready_line == (
        f"swiftcache donor gpu-box.1: host, 2 MiB in 2 extents of 1 MiB, {donor.spec}\n"
    )
    assert "rounded down to 2 extents" in donor.log()
    donor.signal(signal.SIGINT)
    assert donor.wait() == 0
    assert donor.process.stdout.read() == b""
    assert "ended" in donor.log()


def test_a_donor_logs_comings_and_goings_in_numbers(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "2MiB")
    user = start_tier(donor.spec)
    user.tier.close()
    log = donor.log()
    assert re.search(rf"receiver test \(process {os.getpid()}\) of user \d+ joined", log)
    assert "left: 2 extents (2 MiB) back" in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--size", "100TiB"], ["100 TiB", "available"]),
        (["--size", "512KiB"], ["at least 1 MiB", "--extent-size"]),
        (["--size", "2MiB", "--extent-size", "1000"], ["multiple of 4096"]),
        (["--size", "2MiB", "--extent-size", "0"], ["extent size of 0", "positive multiple"]),
        (["--size", "2MiB", "--name", "a/b"], ["'a/b'", "expected"]),
        (["--size", "2MiB", "--name", ""], ["donor name ''", "expected"]),
        (["--size", "2MiB", "--allow-user", "nobody-has-this-name"], ["nobody-has-this-name"]),
        (["--size", "2MiB", "--owner-pid", "999999999"], ["999999999", "--owner-pid"]),
        (["--size", "2MiB", "--runtime-dir", "/proc/nowhere"], ["/proc/nowhere"]),
        (["--size", "2MiB", "--device", "toaster"], ["'toaster'"]),
        (["--size", "much"], ["'much'", "40GiB"]),
        (["--size", "-1GiB"], ["--size", "expected one argument", "--help"]),
        (["--size=-1GiB"], ["'-1GiB'", "40GiB"]),
        (["--size", "2MiB", "--colour", "red"], ["--colour", "--help"]),
        ([], ["--size", "required"]),
    ],
)
def test_what_a_donor_cannot_do_is_said_in_one_line(
    swiftcache: Any, flags: list[str], words: list[str]
) -> None:
    done = swiftcache("donor", "--device", "host", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    line = done.stderr
    assert line.startswith("swiftcache: ")
    assert line.count("\n") == 1
    for word in words:
        assert word in line


@pytest.mark.parametrize("is_owned", [False, True])
def test_more_extents_than_open_files_is_said_in_one_line(
    child_env: Any, settings: Any, runtime_dir: Path, is_owned: bool
) -> None:
    """And what its user can do: who has a server start it has no options."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from swiftcache_tier.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ["donor", "--device", "host", "--size", "4MiB", "--extent-size", "4096"]
    if is_owned:
        flags += ["--owner-pid", str(os.getpid())]
    done = subprocess.run(
        [sys.executable, "-c", script, *flags, "--runtime-dir", str(runtime_dir)],
        env=child_env(settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == (0 if is_owned else 2), "an owned one goes on in the background"
    assert done.stderr.count("\n") == 1
    assert "the limit is 512" in done.stderr
    assert ("SWIFTCACHE_EXTENT_BYTES" in done.stderr) == is_owned
    assert ("--extent-size" in done.stderr) != is_owned


def test_a_name_that_is_taken(swiftcache: Any, start_donor: Any) -> None:
    donor = start_donor("a", "1MiB")
    done = swiftcache("donor", "--device", "host", "--size", "1MiB", "--name", "a")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "'a' is taken" in done.stderr
    assert donor.status().state == "serving"


def test_a_setting_that_is_wrong(swiftcache: Any) -> None:
    for command in (["donor", "--device", "host", "--size", "1MiB"], ["status"]):
        done = swiftcache(*command, env={"SWIFTCACHE_HEARTBEAT_S": "soon"})
        assert done.returncode == 2
        assert done.stderr.startswith("swiftcache: SWIFTCACHE_HEARTBEAT_S is 'soon'")
        assert done.stderr.count("\n") == 1


def test_smaller_extents_can_be_chosen(start_donor: Any) -> None:
    donor = start_donor("a", "64KiB", "--extent-size", "16KiB")
    assert "64 KiB in 4 extents of 16 KiB" in donor.ready_line


def test_status_of_nothing_says_what_to_do(swiftcache: Any, runtime_dir: Path) -> None:
    done = swiftcache("status")
    assert done.returncode == 0
    assert "swiftcache donor --device host" in done.stdout
    assert json.loads(swiftcache("status", "--json").stdout) == {
        "runtime_dir": str(runtime_dir),
        "donors": [],
    }
    done = swiftcache("status", "--runtime-dir", str(runtime_dir / "absent"))
    assert done.returncode == 0
    assert not (runtime_dir / "absent").exists()


def test_status_shows_who_holds_what(
    swiftcache: Any, start_donor: Any, start_receiver: Any, runtime_dir: Path
) -> None:
    donor = start_donor("a", "4MiB")
    receiver = start_receiver("chat[1]", donor.spec)
    document = json.loads(swiftcache("status", "--json").stdout)
    (line,) = document["donors"]
    (holder,) = line.pop("receivers")
    assert holder.pop("heartbeat_age_s") >= 0
    assert holder == {
        "name": "chat[1]",
        "pid": receiver.process.pid,
        "user": holder["user"],
        "extents": {"offered": 0, "lent": 4, "reclaiming": 0, "orphaned": 0, "degraded": 0},
        "bytes": 4 << 20,
        "link": "host",
        "gb_per_s": None,
    }
    assert line == {
        "name": "a",
        "spec": donor.spec,
        "state": "serving",
        "problem": None,
        "device": "host",
        "device_uuid": None,
        "device_model": None,
        "pid": donor.process.pid,
        "owner_pid": None,
        "extent_bytes": 1 << 20,
        "extents": {
            "free": 0,
            "offered": 0,
            "lent": 4,
            "reclaiming": 0,
            "orphaned": 0,
            "degraded": 0,
        },
        "bytes": 4 << 20,
        "bytes_lent": 4 << 20,
        "elastic": False,
        "bytes_kept": 0,
        "limits": {"bytes": None, "each_bytes": None, "receiver_bytes": {}},
    }
    table = swiftcache("status").stdout
    for word in ("a", "serving", "LINK", "4 MiB", "4 lent", "chat[1]", str(receiver.process.pid)):
        assert word in table


def test_status_shows_stale_and_stuck_donors(
    swiftcache: Any, start_donor: Any, settings: Any
) -> None:
    killed, stuck = start_donor("killed", "1MiB"), start_donor("stuck", "1MiB")
    start_donor("well", "1MiB")
    killed.signal(signal.SIGKILL)
    killed.wait()
    stuck.signal(signal.SIGSTOP)
    impatient = replace(settings, status_timeout_s=0.5).as_env()
    done = swiftcache("status", "--json", env=impatient)
    assert done.returncode == 0
    states = {donor["name"]: donor["state"] for donor in json.loads(done.stdout)["donors"]}
    assert states == {"killed": "stale", "stuck": "unresponsive", "well": "serving"}
    table = swiftcache("status", env=impatient).stdout
    assert "killed: the donor at" in table
    assert "start it again (a server that lends: on its port), or delete" in table
    for path in killed.paths:
        assert str(path) in table
    assert "has not answered for 0.5 s" in table
    for path in killed.paths:
        path.unlink()
    listed = json.loads(swiftcache("status", "--json", env=impatient).stdout)["donors"]
    assert {donor["name"] for donor in listed} == {"stuck", "well"}


def test_status_of_a_folder_that_is_not_safe(swiftcache: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    done = swiftcache("status", "--runtime-dir", str(tmp_path))
    assert done.returncode == 2
    assert "chmod 700" in done.stderr
