"""`swiftcache up` with real processes: started in order, watched, and ended in every phase."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tier.cluster.conftest import Up, running

from support.processes import end_tree, free_port, wait_until
from swiftcache_tier.cluster.commands import SWIFTCACHE, Member
from swiftcache_tier.cluster.process import MemberProcess
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.memory import available_host_bytes
from swiftcache_tier.settings import Settings

Start = Callable[[str], Up]

DEADLINE_S = 60.0
TESTS = Path(__file__).resolve().parents[2]
FAKE_GPUS = TESTS / "tier" / "control" / "fake_gpus"
SLEEPER = (sys.executable, "-c", "import time; time.sleep(3600)")


def server(name: str, port: int, flags: str = "", more: str = "") -> str:
    return f"  {name}: {{model: {name}-model, port: {port}, args: '{flags}'{more}}}\n"


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


def test_donors_serve_before_receivers_start_and_all_end_on_ctrl_c(
    start_up: Start, ports: list[int]
) -> None:
    first, second, third = ports
    up = start_up(
        "donors: {attic: {device: host, size: 64MiB}}\n"
        "env: {GREETING: hello}\n"
        "servers:\n"
        + server("chat", first, "--page-size 16", ", role: receiver")
        + server("code", second, "", ", role: donor")
        + server("plain", third)
    )
    up.wait_for("ready: ")
    for name, port in (("chat", first), ("code", second), ("plain", third)):
        assert f"{name} at http://127.0.0.1:{port}" in up.said()
    chat, code = up.record(first), up.record(second)
    assert chat["time"] > code["time"]
    assert up.said().index("starting attic") < up.said().index("starting code")
    assert chat["argv"][-3:] == ["--swiftcache-donors", "--page-size", "16"]
    assert code["argv"][-2:] == ["--swiftcache-donate", "auto"]
    assert chat["greeting"] == "hello"
    status = ["-m", "swiftcache_tier", "status", "--json", "--runtime-dir", chat["runtime_dir"]]
    listed = subprocess.run([up.process.args[0], *status], capture_output=True, check=True)
    assert b'"attic"' in listed.stdout
    pids = up.pids()
    assert running(pids) == pids
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert running(pids) == set()
    listed = subprocess.run([up.process.args[0], *status], capture_output=True, check=True)
    assert b'"attic"' not in listed.stdout, "the donor ended in order and took its sockets along"


def test_lines_are_forwarded_with_the_name_before_them(start_up: Start, ports: list[int]) -> None:
    up = start_up("servers:\n" + server("a", ports[0]) + server("longer", ports[1]))
    up.wait_for("ready: ")
    for name in ("a     ", "longer"):
        for line in (f"loading {name.strip()}-model", "50%", "100%", "serving"):
            wait_until(
                lambda text=f"{name} | {line}": text in up.forwarded(), DEADLINE_S, f"{line} shows"
            )
    long = [line for line in up.forwarded() if line.startswith("longer | Wooo")]
    assert sum(map(len, long)) > 60_000, "a line that never seems to end is not held back"
    up.signal(signal.SIGTERM)
    assert up.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_servers_load_ends_them(
    start_up: Start, ports: list[int], number: signal.Signals
) -> None:
    up = start_up(
        "servers:\n"
        + server("slow", ports[0], "--fake-silent", ", gpu: 0")
        + server("later", ports[1], "", ", gpu: 0")
    )
    pids = set(up.record(ports[0])["pids"])
    up.signal(number)
    assert up.wait() == 0
    assert running(pids) == set()
    assert "starting later" not in up.said()


def test_a_second_signal_does_not_wait_for_a_server_that_does_not_end(
    start_up: Start, ports: list[int]
) -> None:
    up = start_up("stop_timeout_s: 3600\nservers:\n" + server("deaf", ports[0], "--fake-stubborn"))
    up.wait_for("ready: ")
    pids = up.pids()
    up.signal(signal.SIGINT)
    up.wait_for("ending deaf")
    assert running(pids) == pids
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert running(pids) == set()


def test_a_server_that_does_not_end_is_killed_after_its_time(
    start_up: Start, ports: list[int]
) -> None:
    up = start_up("stop_timeout_s: 0.5\nservers:\n" + server("deaf", ports[0], "--fake-stubborn"))
    up.wait_for("ready: ")
    pids = up.pids()
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert running(pids) == set()


def test_a_server_that_fails_to_start_ends_the_others_and_is_named(
    start_up: Start, ports: list[int]
) -> None:
    up = start_up("servers:\n" + server("good", ports[0]) + server("bad", ports[1], "--fake-exit"))
    assert up.wait() == 1
    (line,) = [line for line in up.said().splitlines() if "exit code" in line]
    assert line == ("swiftcache up: bad ended with exit code 3; it said: ValueError: no such model")
    assert running(up.pids()) == set()


def test_a_server_that_is_not_ready_in_time_is_named(start_up: Start, ports: list[int]) -> None:
    up = start_up("start_timeout_s: 1\nservers:\n" + server("slow", ports[0], "--fake-silent"))
    assert up.wait() == 1
    assert "slow not ready after 1 s" in up.said()
    assert running(up.pids()) == set()


def test_a_server_that_breaks_later_ends_the_others(
    start_up: Start, ports: list[int], tmp_path: Any
) -> None:
    sign = tmp_path / "break"
    up = start_up(
        "servers:\n"
        + server("good", ports[0])
        + server("weak", ports[1], f"--fake-end-when {sign}")
    )
    up.wait_for("ready: ")
    sign.touch()
    assert up.wait() == 1
    assert "weak ended with exit code 1; it said: RuntimeError: it broke" in up.said()
    assert running(up.pids()) == set()


def test_servers_end_when_nobody_reads_their_lines(
    environment: dict[str, str], ports: list[int], start_up: Start, tmp_path: Any
) -> None:
    up = start_up("servers:\n" + server("a", ports[0]))  # writes the file
    up.wait_for("ready: ")
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    (tmp_path / f"{ports[0]}.json").unlink()
    piped = subprocess.Popen(
        [*up.process.args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert piped.stdout is not None
    piped.stdout.close()
    assert piped.wait(DEADLINE_S) == 0
    assert running(up.pids()) == set()


@pytest.fixture
def others_donor(environment: dict[str, str], tmp_path: Any) -> Iterator[Callable[[str], int]]:
    """Start a donor of that name that is not the cluster's; its process id."""
    with contextlib.ExitStack() as at_end:

        def start(name: str) -> int:
            process = subprocess.Popen(
                [*SWIFTCACHE, "donor", "--device", "host", "--size", "64MiB", "--name", name],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            at_end.callback(end_tree, process)
            assert process.stdout is not None
            assert process.stdout.readline(), "it says that it is ready"
            return process.pid

        yield start


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
@pytest.mark.parametrize("kind", ["donors", "servers"])
def test_a_name_that_a_live_donor_has_is_said_before_anything_starts(
    swiftcache_up: Any,
    others_donor: Callable[[str], int],
    ports: list[int],
    tmp_path: Any,
    kind: str,
    flags: tuple[str, ...],
) -> None:
    port = ports[0]
    if kind == "donors":
        name, who, text = "ada", "donor 'ada'", "donors: {ada: {device: host, size: 16MiB}}"
    else:
        name, who = f"engine-{port}", "server 'code'"
        text = "servers:\n" + server("code", port, "", ", role: donor")
    others_donor(name)
    (tmp_path / "c.yaml").write_text(text)
    done = swiftcache_up(tmp_path / "c.yaml", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"{who}: donor name {name!r} is taken by a donor that runs" in done.stderr
    assert "end that donor" in done.stderr


def test_only_the_donor_that_was_started_counts_as_ready(
    others_donor: Callable[[str], int], tmp_path: Any
) -> None:
    pid = others_donor("ada")
    paths = donor_paths(tmp_path / "runtime", "ada")
    assert query_status(paths, Settings()).pid == pid

    async def is_serving() -> bool:
        process = MemberProcess(Member("ada", SLEEPER, {}, paths), lambda *_: None)
        await process.start()
        try:
            return await process.is_serving(Settings())
        finally:
            await process.end(DEADLINE_S, asyncio.Event())

    assert asyncio.run(is_serving()) is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("donors: {d: {device: host, size: 100TiB}}", ["'d': size 100 TiB is over", "available"]),
        ("donors: {d: {device: host, size: 1MiB}}", ["'d': size 1 MiB", "at least 64 MiB"]),
        ("donors: {d: {device: 'cuda:4095', size: 1GiB}}", ["donor 'd': "]),
        (
            "{env: {SWIFTCACHE_BOGUS: '1'}, donors: {d: {device: host, size: 64MiB}}}",
            ["of 'd': ", "SWIFTCACHE_BOGUS is not known"],
        ),
        (
            "servers: {a: {model: m, env: {SWIFTCACHE_HEARTBEAT_S: soon}}}",
            ["of 'a': SWIFTCACHE_HEARTBEAT_S is 'soon': expected a number"],
        ),
        (
            "servers: {a: {model: m, env: {SWIFTCACHE_LOG_FORMAT: yaml}}}",
            ["of 'a': SWIFTCACHE_LOG_FORMAT is 'yaml': expected"],
        ),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_what_cannot_work_is_said_before_anything_starts(
    swiftcache_up: Any, tmp_path: Any, text: str, said: list[str], flags: tuple[str, ...]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = swiftcache_up(tmp_path / "c.yaml", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    for words in said:
        assert words in done.stderr


def test_a_gpu_is_asked_before_anything_starts(
    swiftcache_up: Any, environment: dict[str, str], tmp_path: Any
) -> None:
    search_path = os.pathsep.join([str(FAKE_GPUS), str(TESTS), environment["PYTHONPATH"]])
    env = {"PYTHONPATH": search_path, "FAKE_GPUS": "2", "FAKE_GPU_MEMORY": str(tmp_path)}
    codes = {}
    for size in ("5GiB", "7GiB"):
        (tmp_path / "c.yaml").write_text(f"donors: {{d: {{device: 'cuda:1', size: {size}}}}}")
        done = swiftcache_up(tmp_path / "c.yaml", "--dry-run", **env)
        codes[size] = done.returncode
    assert codes == {"5GiB": 0, "7GiB": 2}
    assert "donor 'd': size 7 GiB is over what device cuda:1 has to give: 6 GiB" in done.stderr


def test_donors_share_the_memory_of_their_device(swiftcache_up: Any, tmp_path: Any) -> None:
    most_of_it = {"device": "host", "size": str(int(available_host_bytes() * 0.6))}
    text = json.dumps({"donors": {"ada": most_of_it, "bob": most_of_it}})
    (tmp_path / "c.yaml").write_text(text)
    done = swiftcache_up(tmp_path / "c.yaml", "--dry-run", SWIFTCACHE_EXTENT_BYTES="256MiB")
    assert done.returncode == 2
    assert "donor 'bob': size" in done.stderr


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_a_port_that_is_taken_is_said_before_anything_starts(
    swiftcache_up: Any, tmp_path: Any, flags: tuple[str, ...]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "c.yaml").write_text("servers:\n" + server("a", port))
        done = swiftcache_up(tmp_path / "c.yaml", *flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"server 'a' cannot listen on 127.0.0.1:{port}" in done.stderr


def test_a_dry_run_prints_what_would_be_typed(swiftcache_up: Any, tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text("servers: {a: {model: m, role: receiver}}")
    done = swiftcache_up(tmp_path / "c.yaml", "--dry-run", "--server-args=--device cpu")
    assert done.returncode == 0
    assert done.stdout.endswith(
        "-m sglang.launch_server --model-path m --host 127.0.0.1 --port 8000 --swiftcache-donors "
        "--device cpu\n"
    )
    assert done.stdout.startswith("SWIFTCACHE_RUNTIME_DIR=")
    by_environment = swiftcache_up("--dry-run", SWIFTCACHE_MASTER_MODEL="m")
    assert "--model-path m" in by_environment.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--port 9", "--server-args: --port cannot be among them: give the server a port: instead"),
        ("--host", "--server-args: expected an address after --host, such as 0.0.0.0"),
    ],
)
def test_flags_that_the_file_sets_are_refused_for_all(
    swiftcache_up: Any, flags: str, words: str
) -> None:
    done = swiftcache_up(f"--server-args={flags}", SWIFTCACHE_MASTER_MODEL="m")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_nothing_to_start_is_said_in_one_line(swiftcache_up: Any) -> None:
    done = swiftcache_up()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "SWIFTCACHE_MASTER_MODEL" in done.stderr
