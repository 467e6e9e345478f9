"""`run_scenarios.py` on fake servers and real donors: every step of the real thing but serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.scenario.file import read_scenario_file

REPOSITORY = Path(__file__).resolve().parents[2]
BENCHMARK = REPOSITORY / "benchmark"
FAKE_SGLANG = Path(__file__).resolve().parent / "fake_sglang"
FILES = sorted([*BENCHMARK.glob("*.yaml"), *BENCHMARK.glob("interference/*.yaml")])

TEXT = """
budget_s: 300
start_timeout_s: 60
expected_start_s: 1
variables: {MODEL: none}
args: --page-size 16
loads:
  few: --num-clients 4 --num-rounds 2 --request-length 8 --output-length 3 --request-rate 200
  steady: >-
    --num-clients 30 --num-rounds 1 --request-length 8 --output-length 3
    --arrivals conversation --request-rate 20
scenarios:
  pair:
    title: Two servers
    against: {window: alone}
    variants:
      only: {servers: {a: {model: $MODEL}, b: {model: $MODEL, role: receiver}}}
    windows:
      - {name: alone, loads: {a: few}}
      - {name: beside, loads: {a: few}, background: {b: steady}}
      - {name: alone, loads: {a: few}}
  twice:
    title: The same server twice
    against: {variant: first}
    variants:
      first: {servers: {a: {model: $MODEL}}}
      second: {servers: {a: {model: $MODEL}}}
    windows: [{name: few, loads: {a: few}}]
  loss:
    title: One donor of four is killed
    variants:
      four:
        donors: &four
          d1: {device: host, size: 64MiB}
          d2: {device: host, size: 64MiB}
          d3: {device: host, size: 64MiB}
          d4: {device: host, size: 64MiB}
        servers: {a: {model: $MODEL, role: receiver}}
      broken: {donors: *four, servers: {a: {model: $MODEL, args: --fake-exit}}}
    windows:
      - name: lost
        loads: {a: steady}
        lose: {donor: d3, after_s: 0.3}
commands:
  script: {title: A script, command: "{python} -c 'print(6 * 7)'", limit_s: 30}
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(model_folder: Path, tmp_path: Path) -> Run:
    (tmp_path / "set.yaml").write_text(TEXT)
    search_path = os.pathsep.join([str(FAKE_SGLANG), str(REPOSITORY)])

    def run_script(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCHMARK / "run_scenarios.py"), str(tmp_path / "set.yaml")]
        command += ["--output-dir", str(tmp_path / "out"), "--set", f"MODEL={model_folder}"]
        return subprocess.run(
            [*command, *words],
            env=os.environ | {"PYTHONPATH": search_path},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run_script


def result(tmp_path: Path, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((tmp_path / "out" / f"{name}.json").read_text())
    return document


def test_windows_of_one_name_are_pooled_and_compared(run: Run, tmp_path: Path) -> None:
    done = run("--only", "pair")
    assert done.returncode == 0, done.stderr
    windows = result(tmp_path, "pair")["variants"]["only"]["windows"]
    alone, beside = windows["alone"]["a"], windows["beside"]["a"]
    assert alone["summary"]["total_requests"] == 2 * beside["summary"]["total_requests"] == 16
    assert windows["beside"]["b"]["summary"]["total_requests"] > 0
    assert "b" not in windows["alone"]
    assert len(alone["average_ttft_s"]) == 2
    assert len(beside["average_ttft_s"]) == 1
    dues = [request["due_s"] for request in alone["requests"]]
    assert max(dues[:8]) < min(dues[8:]), "the second window follows the first on one clock"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Base of the ratios: window `alone`." in report
    assert "| beside | only | a |" in report
    assert "TPOT P99 / base" in report


def test_variants_are_compared_request_by_request(run: Run, tmp_path: Path) -> None:
    assert run("--only", "twice").returncode == 0
    second = result(tmp_path, "twice")["variants"]["second"]["windows"]["few"]["a"]
    assert second["outputs"] == {"answered": 8, "same_prompt": 8, "same_output": 8}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Base of the ratios: variant `first`." in report
    assert "| 8 of 8 |" in report
    first = result(tmp_path, "twice")["variants"]["first"]
    assert run("--only", "twice:second").returncode == 0
    assert result(tmp_path, "twice")["variants"]["first"] == first, "it stays as it was measured"
    assert list(result(tmp_path, "twice")["variants"]) == ["first", "second"]


def test_a_lost_donor_and_a_variant_that_fails_are_both_in_the_report(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "page.md").write_text("# Mine\n<!-- set: begin -->\nold\n<!-- set: end -->\nend\n")
    done = run("--only", "loss", "--write-docs", str(tmp_path / "page.md"))
    assert done.returncode == 1
    variants = result(tmp_path, "loss")["variants"]
    assert "it said: the fake gives up" in variants["broken"]["error"]
    lost = variants["four"]["windows"]["lost"]["a"]
    counts = [lost["loss"][name]["requests"] for name in ("before", "around", "after")]
    assert sum(counts) == lost["summary"]["total_requests"] == 30
    assert counts[0] > 0
    assert counts[1] > 0
    log = tmp_path / "out" / "logs" / "loss" / "four" / "donor-d3.log"
    assert "ended" not in log.read_text(), "it was killed, and did not end in order"
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# Mine\n<!-- set: begin -->\n\nMeasured ")
    assert page.endswith("<!-- set: end -->\nend\n")
    assert "old" not in page
    assert "TTFT P99 before, ms" in page
    assert "**not complete**, broken" in page


def test_what_was_measured_before_stays_in_the_report(run: Run, tmp_path: Path) -> None:
    assert run("--only", "script").returncode == 0
    late = run("--only", "pair", "--budget-s", "1")
    assert late.returncode == 1
    assert "was left out" in result(tmp_path, "pair")["variants"]["only"]["error"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.index("## Two servers") < report.index("## A script")
    assert "\n42\n" in report


def test_bad_input_is_one_line(run: Run, tmp_path: Path) -> None:
    for words in (["--only", "nothing"], ["--set", "X"], ["--set", "COLOUR=red"]):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("scenarios: ")


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BENCHMARK)))
def test_the_files_of_the_repository_fit_into_their_budgets(path: Path) -> None:
    file = read_scenario_file(path, {})
    assert file.expected_s() <= file.budget_s <= 1200


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("budget_s: 300", "budget_s: 0", "budget_s"),
        ("budget_s: 300", "budgets: 300", "budgets"),
        ("{a: few}}", "{a: many}}", "no load 'many', expected any of few, steady"),
        ("{a: few}}", "{z: few}}", "loads 'z', which variant 'only' lacks"),
        ("{window: alone}", "{window: nowhere}", "compares with window 'nowhere'"),
        ("{window: alone}", "{variant: nowhere}", "compares with variant 'nowhere'"),
        ("donor: d3", "donor: d9", "loses 'd9'"),
        ("--num-clients 4", "--num-clients four", "a load's flags"),
        ("$MODEL", "$$ROLE $LOST", "uses \\$LOST"),
        ("scenarios:", "scenarios: [", "set.yaml"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = tmp_path / "set.yaml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(BenchmarkError, match=words) as caught:
        read_scenario_file(path, {})
    assert "\n" not in str(caught.value)
