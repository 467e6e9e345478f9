"""The comparison, end to end, with fake servers for contenders."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import psutil
import pytest

from support.processes import wait_until
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.server.api import is_healthy
from swiftcache_bench.server.attached import AttachedServer
from swiftcache_bench.server.processes import free_port, port_is_free

FAKE = Path(__file__).with_name("fake_server.py")
BENCHMARK = Path(compare.__file__).parent
BROKEN = "one=--fake-exit"


class Setting:
    """A comparison of fake servers, its output in ``folder``."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._args = ["--model-path", str(model), "--output-dir", str(folder), "--device", "cpu"]
        self._args += ["--num-clients", "3", "--num-rounds", "2", "--request-length", "12"]
        self._args += ["--output-length", "3", "--warmup-conversations", "1"]

    def prepare(self, *args: str) -> compare.Comparison:
        comparison = compare.prepare(self._parse(*args))
        fake = replace(
            comparison.launch,
            launch=(sys.executable, str(FAKE)),
            common_flags=(),
            port_free_timeout_s=10.0,
            stop_grace_s=5.0,
        )
        return comparison._replace(launch=fake)

    def run(self, *args: str) -> tuple[int, dict[str, Any]]:
        comparison = self.prepare(*args)
        code = compare.run(comparison, self.folder, self._parse(*args).tag)
        assert port_is_free(comparison.launch.port)
        return code, json.loads((self.folder / "result.json").read_text())

    def arguments(self, *args: str) -> list[str]:
        return [*self._args, *args]

    def _parse(self, *args: str) -> argparse.Namespace:
        return compare.parse_args(self.arguments(*args))


@pytest.fixture
def setting(model_folder: Path, tmp_path: Path) -> Setting:
    return Setting(model_folder, tmp_path / "out")


def two(*names: str) -> list[str]:
    flags = [word for name in names for word in ("--contender", name)]
    return [*flags, "--only", *(name.partition("=")[0] for name in names)]


def test_contenders_get_the_same_requests_and_are_compared(setting: Setting) -> None:
    code, result = setting.run(
        *two("one=--page-size 16", "two=--page-size 64"),
        *("--request-rate", "500", "inf", "--baseline", "two"),
    )
    assert code == 0
    assert result["complete"]
    assert result["baseline"] == "two"
    one, second = result["contenders"]
    assert [len(contender["runs"]) for contender in (one, second)] == [2, 2]
    for mine, theirs in zip(one["runs"], second["runs"], strict=True):
        assert prompts_of(mine) == prompts_of(theirs)
        assert mine["against_baseline"]["outputs"]["same_output"] == 6
        assert mine["summary"]["total_requests"] == 6
        # The warm-up left nothing in the cache, and neither did the run before.
        assert mine["round"]["round_0"]["cache_hit_rate"] < 0.1
        assert mine["round"]["round_1"]["cache_hit_rate"] > 0.4
    assert one["flags"]["confirmed"] == ["--page-size"]
    page = (setting.folder / "report.md").read_text()
    assert "500 requests/s" in page
    assert "closed loop, 128 at once" in page


def prompts_of(run: dict[str, Any]) -> set[tuple[int, int, str]]:
    return {(r["conversation"], r["round"], r["prompt_digest"]) for r in run["requests"]}


def test_a_contender_that_fails_does_not_stop_the_others(setting: Setting) -> None:
    code, result = setting.run(*two(BROKEN, "two="), "--request-rate", "inf")
    assert code == 1
    assert not result["complete"]
    one, second = result["contenders"]
    assert "exit code 3" in one["error"]
    assert one["runs"] == []
    assert second["error"] is None
    assert second["complete"]
    assert "exit code 3" in (setting.folder / "report.md").read_text()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts fake servers that are nobody's contender; gives their URLs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int, *flags: str) -> str:
        command = [sys.executable, str(FAKE), "--host", "127.0.0.1", "--port", str(port), *flags]
        started.append(subprocess.Popen(command))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_healthy(url, 1.0), 30, f"the fake server at {url} answers")
        return url

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_that_runs_already_is_measured_and_left_running(
    setting: Setting, running: Callable[..., str]
) -> None:
    url = running(free_port(), "--weight-version", "mine")
    code, result = setting.run(
        *("--attach", f"mine={url}", "--request-rate", "500"),
        *("--contender", "other=", "--only", "other"),
    )
    assert code == 0
    mine, other = result["contenders"]
    assert [mine["name"], other["name"]] == ["mine", "other"]
    assert mine["command"] == []
    assert mine["runs"][0]["summary"]["failed_requests"] == 0
    assert is_healthy(url, 5.0)


def test_what_is_known_is_written_after_each_run(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[int]] = []
    write_document = compare.write_document

    def note(path: Path, document: dict[str, Any]) -> None:
        written.append([len(contender["runs"]) for contender in document["contenders"]])
        write_document(path, document)

    monkeypatch.setattr(compare, "write_document", note)
    setting.run(*two("one=", "two="), "--request-rate", "500", "inf")
    assert written == [[1], [2], [2], [2, 1], [2, 2], [2, 2]]


def test_nothing_is_started_beside_attached_servers(
    setting: Setting, running: Callable[..., str]
) -> None:
    attached = ("--attach", f"mine={running(free_port())}")
    assert setting.prepare(*attached).contenders == []


def test_a_server_that_took_the_attached_ones_place_is_not_measured(
    running: Callable[..., str],
) -> None:
    port = free_port()
    server = AttachedServer("mine", running(port, "--weight-version", "a"))
    assert server.check() == server.check()
    (process,) = (p for p in psutil.Process().children() if str(port) in p.cmdline())
    process.kill()
    process.wait()
    running(port, "--weight-version", "b")
    with pytest.raises(BenchmarkError, match="another server answers"):
        server.check()


def test_requests_that_fail_are_the_exit_code(setting: Setting) -> None:
    code, result = setting.run(
        *two("one=--fake-fault cut"), "--request-rate", "inf", "--warmup-conversations", "0"
    )
    assert code == 1
    summary = result["contenders"][0]["runs"][0]["summary"]
    assert summary["failed_requests"] == 3
    assert summary["skipped_requests"] == 3


def test_a_failed_warm_up_ends_the_contender(setting: Setting) -> None:
    code, result = setting.run(*two("one=--fake-fault abort"), "--request-rate", "inf")
    assert code == 1
    assert "warm-up" in result["contenders"][0]["error"]


def test_the_probe_is_part_of_the_result(setting: Setting) -> None:
    code, result = setting.run(
        *two("one="), "--request-rate", "inf", "--probe-lengths", "40", "80", "--probe-repeats", "1"
    )
    assert code == 0
    rows = result["contenders"][0]["probe"]["lengths"]
    assert [row["length"] for row in rows] == [40, 80]
    assert all(row["evicted_to_device"] > 0 for row in rows)
    assert rows[0]["cold_to_baseline"] == 1.0
    assert "One prefix at a time" in (setting.folder / "report.md").read_text()


def test_donors_are_started_for_the_contender_that_needs_them(setting: Setting) -> None:
    code, result = setting.run("--donors", "host=64MiB", "--request-rate", "inf")
    assert code == 0, [contender["error"] for contender in result["contenders"]]
    stock, swiftcache = result["contenders"]
    assert stock["name"] == "stock"
    assert stock["donors"] == []
    assert swiftcache["donors"] == ["host=64MiB"]
    assert "auto" in swiftcache["command"]
    assert (setting.folder / "logs" / "swiftcache" / "donor-bench-0.log").exists()


def test_the_result_says_how_it_was_measured(setting: Setting) -> None:
    _, result = setting.run(*two("one="), "--request-rate", "inf", "--tag", "by hand")
    assert result["tag"] == "by hand"
    assert result["commit"]
    assert result["versions"]["sglang"]
    assert result["machine"]["cpu_cores"] >= 1
    assert result["command"]
    assert result["contenders"][0]["pool_tokens"] == 200


DRIVER = """
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
import compare

real = compare.prepare
launch = (sys.executable, {fake!r})

def prepare(args):
    comparison = real(args)
    return comparison._replace(launch=replace(comparison.launch, launch=launch))

compare.prepare = prepare
sys.exit(compare.main())
"""


def test_a_comparison_that_is_ended_leaves_no_process_behind(
    setting: Setting, tmp_path: Path
) -> None:
    child_file = tmp_path / "child"
    args = setting.arguments(*two(f"one=--fake-child {child_file} --fake-fault hang"))
    command = [sys.executable, "-c", DRIVER.format(fake=str(FAKE)), *args]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stderr=log, env={**os.environ, "PYTHONPATH": str(BENCHMARK)}
        )
    try:
        log_text = (tmp_path / "log").read_text
        wait_until(lambda: "warm-up" in log_text(), 60, "the server is being measured")
        child = int(child_file.read_text())
        assert psutil.pid_exists(child)
        process.terminate()
        assert process.wait(60) == compare.EXIT_TERMINATED
    finally:
        process.kill()
        process.wait()
    assert not psutil.pid_exists(child)


def test_a_file_of_contenders_is_taken(setting: Setting, tmp_path: Path) -> None:
    path = tmp_path / "contenders.yaml"
    path.write_text("contenders: {mine: {args: --page-size 4}}\nbaseline: mine\n")
    comparison = setting.prepare("--config", str(path), "--only", "stock", "mine")
    assert comparison.baseline == "mine"
    assert [contender.name for contender in comparison.contenders] == ["stock", "mine"]


def test_a_trace_is_one_run_whatever_the_rates(setting: Setting, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [1]}
    path.write_text(json.dumps(row))
    plan = setting.prepare("--dataset-path", str(path), "--request-rate", "1", "2").plan
    assert [load.arrivals for load in plan.loads] == ["trace"]


@pytest.mark.parametrize(
    "args",
    [
        ["--only", "nobody"],
        ["--baseline", "nobody"],
        ["--contender", "broken"],
        ["--donors", "auto"],
        ["--server-args", "--flag 'open"],
        ["--request-rate", "0"],
        ["--config", "nowhere.yaml"],
        ["--attach", "mine=localhost:30000"],
        ["--attach", "one=http://localhost:1", "--contender", "one=", "--only", "one"],
        ["--dataset-path", "nowhere.jsonl"],
    ],
)
def test_a_bad_request_is_refused_before_anything_is_started(
    setting: Setting, args: list[str]
) -> None:
    with pytest.raises(BenchmarkError) as caught:
        setting.prepare(*args)
    assert "\n" not in str(caught.value)
    assert not setting.folder.exists()
