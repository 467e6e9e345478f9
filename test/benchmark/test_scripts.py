"""The scripts as they are called: exit codes, what they print and what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from benchmark.fake_server import REFUSAL

from support.processes import end_tree, free_port, wait_until

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"
FAKE = Path(__file__).with_name("fake_server.py")
SMALL = ["--num-clients", "3", "--num-rounds", "2", "--request-length", "20"]
SMALL += ["--output-length", "3", "--request-rate", "inf"]


@pytest.fixture
def fake(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a fake server; parametrize indirectly with flags for it."""
    port = free_port()
    flags = getattr(request, "param", [])
    command = [sys.executable, str(FAKE), "--port", str(port), "--model-path", str(model_folder)]
    with (tmp_path / "fake.log").open("wb") as log:
        process = subprocess.Popen([*command, *flags], stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(port), 30, "the fake server answers")
        yield port
    finally:
        end_tree(process)


def answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok
    except requests.RequestException:
        return False


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK / script), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rows_of(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_conversations_are_measured_and_logged(fake: int, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run(
        "hicache/bench_multiturn.py", "--port", fake, "--log-file", log, "--tag", "mine", *SMALL
    )
    assert done.returncode == 0, done.stderr
    assert "Total requests: 6 at inf requests per second" in done.stdout
    assert "Cache Hit Rate" in done.stdout
    (row,) = rows_of(log)
    assert row["tag"] == "mine"
    assert row["summary"]["total_requests"] == 6
    assert row["summary"]["cache_hit_rate"] == pytest.approx((20 + 3) / (20 + 43), abs=0.02)
    assert row["round"]["round_0"]["cache_hit_rate"] < 0.1
    assert row["round"]["round_1"]["average_prompt_len"] == 20 + 3 + 20
    assert row["settings"]["seed"] == 1


def test_several_rates_are_several_runs_of_the_same_requests(fake: int, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run("hicache/bench_multiturn.py", "--port", fake, "--log-file", log, *SMALL, 500, "inf")
    assert done.returncode == 0, done.stderr
    rows = rows_of(log)
    assert [row["settings"]["request_rate"] for row in rows] == ["inf", 500, "inf"]
    assert len({row["settings"]["workload_digest"] for row in rows}) == 1
    # Flushed between runs: each begins with a miss.
    assert all(row["round"]["round_0"]["cache_hit_rate"] < 0.1 for row in rows)


def test_contexts_are_shared_by_their_queries(fake: int, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    sizes = ["--num-clients", 8, "--request-length", 60, "--sub-question-input-length", 5]
    sizes += ["--output-length", 2, "--request-rate", "inf", "--max-parallel", 1]
    done = run("hicache/bench_long_context.py", "--port", fake, "--log-file", log, *sizes)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(log)
    assert row["summary"]["total_requests"] == 8
    assert row["summary"]["average_prompt_len"] == 65
    assert row["summary"]["cache_hit_rate"] == pytest.approx(6 * 60 / (8 * 65), abs=0.02)


def test_a_data_set_is_sent_as_its_conversations(fake: int, tmp_path: Path) -> None:
    data, log = tmp_path / "task.jsonl", tmp_path / "log.jsonl"
    row = {"input": "word " * 100, "instructions": ["a?", "b?"], "outputs": ["yes it is", "no"]}
    data.write_text(json.dumps(row))
    done = run(
        "hicache/bench_multiturn.py",
        *("--port", fake, "--log-file", log, "--dataset-path", data, "--request-rate", "inf"),
        *("--warm-first-round",),
    )
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(log)
    assert row["summary"]["warmup_requests"] == 1
    assert row["summary"]["total_requests"] == 1
    assert list(row["round"]) == ["round_1"]
    assert row["settings"]["workload"] == "L-Eval task"


@pytest.mark.parametrize("fake", [["--fake-fault", "refuse"]], indirect=True)
def test_failures_are_shown_and_are_the_exit_code(fake: int, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    done = run("hicache/bench_multiturn.py", "--port", fake, "--log-file", log, *SMALL)
    assert done.returncode == 1
    assert "INCOMPLETE" in done.stdout
    assert "3 failed" in done.stdout
    assert "3 never sent" in done.stdout
    assert REFUSAL in done.stdout
    (row,) = rows_of(log)
    assert row["summary"]["failed_requests"] == 3
    assert row["summary"]["average_ttft"] is None


@pytest.mark.parametrize("script", ["hicache/bench_multiturn.py", "hicache/bench_long_context.py"])
def test_without_a_server_one_line_says_so(script: str, tmp_path: Path) -> None:
    done = run(script, "--port", free_port(), "--log-file", tmp_path / "log.jsonl")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is a server up there?" in done.stderr
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset-path", "nowhere.jsonl"],
        ["--min-rounds", 3, "--max-rounds", 2],
        ["--request-rate", 0],
        ["--arrivals", "trace"],
        ["--max-parallel", 0],
    ],
)
def test_bad_input_is_one_line(fake: int, model_folder: Path, flags: list[object]) -> None:
    done = run("hicache/bench_multiturn.py", "--port", fake, "--model-path", model_folder, *flags)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "script", ["hicache/bench_multiturn.py", "hicache/bench_long_context.py", "compare.py"]
)
def test_help_needs_no_server(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    flags = "--num-clients --max-parallel --request-length --output-length --num-rounds"
    flags += " --request-rate --distribution --sub-question-input-length --ready-queue-policy"
    flags += " --dataset-path --seed --disable-random-sample --model-path"
    for flag in flags.split():
        assert flag in done.stdout
