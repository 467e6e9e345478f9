"""Reports: every figure that was measured, none that was not, and failures in plain sight."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import orjson
import pytest
from benchmark.made_up import LOAD, RUN, failed, outcome, plan, probe, record

from swiftcache_bench.against_baseline import ratios, same_outputs
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.load import LoadResult
from swiftcache_bench.report.console import summary_lines
from swiftcache_bench.report.document import comparison_document, write_document
from swiftcache_bench.report.jsonl import append_run
from swiftcache_bench.report.markdown import comparison_page
from swiftcache_bench.report.plots import write_plots
from swiftcache_bench.server.identity import FlagCheck
from swiftcache_bench.statistics import run_figures

SLOW = [record(i, r, ttft_s=2.0 + i) for i in range(3) for r in range(2)]
FAST = [record(i, r, ttft_s=1.0 + i / 2) for i in range(3) for r in range(2)]


def document_of(*outcomes, baseline: str = "slow"):  # type: ignore[no-untyped-def]
    return comparison_document(RUN, plan(), outcomes, baseline)


# -- against a baseline -----------------------------------------------------------------------


def test_ratios_are_a_contenders_figures_over_the_baselines() -> None:
    document = document_of(outcome("slow", SLOW), outcome("fast", FAST))
    slow, fast = (c["runs"][0]["against_baseline"]["ratios"] for c in document["contenders"])
    assert slow["average_ttft"] == slow["throughput"] == 1.0
    assert fast["average_ttft"] == 0.5
    assert fast["p99_ttft"] == pytest.approx(0.5)


def test_there_is_no_ratio_where_a_figure_is_missing() -> None:
    nothing = run_figures(LoadResult([], 0), None).summary
    something = run_figures(LoadResult(SLOW, 0), None).summary
    assert set(ratios(nothing, something).values()) == {None}
    assert set(ratios(something, nothing).values()) == {None}


def test_outputs_are_compared_where_the_prompt_was_the_same() -> None:
    mine = [
        record(0, 0),
        record(0, 1, output_digest="other"),
        record(0, 2, prompt_digest="other"),
        failed(1, 0),
        record(2, 0),
    ]
    theirs = [record(0, 0), record(0, 1), record(0, 2), record(1, 0), failed(2, 0)]
    same = same_outputs(mine, theirs)
    assert (same.answered, same.same_prompt, same.same_output) == (3, 2, 1)


def test_without_the_baseline_there_are_no_ratios() -> None:
    document = document_of(outcome("fast", FAST))
    assert document["contenders"][0]["runs"][0]["against_baseline"] is None
    assert "fast" in comparison_page(document, [])


# -- the document and the page ----------------------------------------------------------------


def test_the_document_is_json_and_says_where_it_was_measured(tmp_path: Path) -> None:
    document = document_of(outcome("slow", SLOW), outcome("fast", FAST))
    write_document(tmp_path / "result.json", document)
    read = json.loads((tmp_path / "result.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert read["commit"] == RUN["commit"]
    assert read["complete"] is True
    assert read["workload"]["digest"] == plan().workload.digest()
    request = read["contenders"][1]["runs"][0]["requests"][0]
    assert request["ttft_s"] == FAST[0].ttft_s
    assert request["prefix_tokens"] == FAST[0].prefix_tokens


def test_the_page_has_every_contenders_figures() -> None:
    page = comparison_page(document_of(outcome("slow", SLOW), outcome("fast", FAST)), ["cdf.png"])
    fast = next(line for line in page.splitlines() if line.startswith("| fast | 1500.0 "))
    assert "0.500" in fast
    assert "6 of 6 with its prompt" in page
    assert "![cdf.png](cdf.png)" in page
    assert "a\\|b" in page
    assert "Incomplete" not in page


def test_shared_flags_that_a_server_changed_are_on_the_page() -> None:
    changed = outcome("fast", FAST)
    changed.flags = FlagCheck((), (), (("--page-size", "16", "64"),))
    page = comparison_page(document_of(outcome("slow", SLOW), changed), [])
    assert "fast was asked for --page-size 16 and runs 64" in page


def test_failures_head_the_page_and_make_the_document_incomplete() -> None:
    ended = outcome("ended", [])
    ended.error = "the server ended with exit code 3"
    document = document_of(outcome("slow", [*SLOW, failed(9)], skipped=1), ended)
    assert document["complete"] is False
    head = comparison_page(document, []).split("##")[0]
    assert "Incomplete" in head
    assert "1 x went wrong" in head
    assert "exit code 3" in head


def test_an_incomplete_run_without_an_error_is_named_too() -> None:
    document = document_of(outcome("slow", SLOW, skipped=4))
    assert document["complete"] is False
    assert "slow" in comparison_page(document, []).split("##")[0].split("Incomplete")[1]


def test_the_probe_is_set_against_the_device_and_the_baseline() -> None:
    slow, fast = outcome("slow", SLOW), outcome("fast", FAST)
    slow.probe = probe({"cold": 4.0, "device": 1.0, "evicted": 4.0}, host_tokens=0)
    fast.probe = probe({"cold": 4.2, "device": 1.0, "evicted": 1.1}, host_tokens=63)
    document = document_of(slow, fast)
    (row,) = document["contenders"][1]["probe"]["lengths"]
    assert row["evicted_to_device"] == pytest.approx(1.1)
    assert row["evicted_to_baseline"] == pytest.approx(1.1 / 4)
    assert row["cold_to_baseline"] == pytest.approx(1.05)
    assert row["evicted_host_tokens"] == 63
    page = comparison_page(document, [])
    assert "| fast | 64 | 4200.0 | 1000.0 | 1100.0 | 0 | 63 | 1.100 | 0.275 | 1.050 |" in page


# -- plots ------------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed"
)
def test_without_matplotlib_one_line_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="pip install") as caught:
        write_plots(document_of(outcome("slow", SLOW)), tmp_path)
    assert "\n" not in str(caught.value)


def test_plots_are_files_beside_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    slow = outcome("slow", SLOW)
    slow.probe = probe({"cold": 4.0, "device": 1.0, "evicted": 4.0}, host_tokens=0)
    names = write_plots(document_of(slow, outcome("none", [failed(0)])), tmp_path)
    assert names == ["ttft_cdf.png", "ttft_prefix.png", "hit_rate.png", "ttft_probe.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


# -- console and log --------------------------------------------------------------------------


def test_the_console_shows_the_figures_in_upstreams_words() -> None:
    text = "\n".join(summary_lines(run_figures(LoadResult(SLOW, 0), 2.0)))
    assert "Total requests: 6 at 2 requests per second" in text
    assert "Average TTFT: 3.0000 s" in text
    assert "P99 TTFT" in text
    assert "Round 1: Average TTFT = 3.0000 s" in text
    assert "INCOMPLETE" not in text


def test_the_console_does_not_hide_failures() -> None:
    records = [*SLOW, failed(7), *(failed(i, error=f"error {i}") for i in range(10, 20))]
    text = "\n".join(summary_lines(run_figures(LoadResult(records, 3), 2.0)))
    assert "INCOMPLETE" in text
    assert "11 failed" in text
    assert "3 never sent" in text
    assert "1 x went wrong" in text
    assert "and 6 other errors" in text


def test_the_console_says_none_where_nothing_was_measured() -> None:
    assert any(
        "Average TTFT: none" in line for line in summary_lines(run_figures(LoadResult([], 0), None))
    )


def test_the_log_gets_a_line_of_json_per_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    figures = run_figures(LoadResult(SLOW, 0), 2.0)
    for tag in ("one", "two"):
        append_run(path, tag, figures, {"request_rate": math.inf, "seed": 1})
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["tag"] for row in rows] == ["one", "two"]
    assert rows[0]["summary"]["average_ttft"] == 3.0
    assert rows[0]["round"]["round_0"]["request_count"] == 3
    assert rows[0]["settings"] == {"request_rate": "inf", "seed": 1}
    assert rows[0]["timestamp"]


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="--log-file"):
        append_run(tmp_path, "", run_figures(LoadResult([], 0), None), {})


def test_loads_of_the_same_settings_are_what_is_compared() -> None:
    document = document_of(outcome("slow", SLOW))
    assert document["contenders"][0]["runs"][0]["load"]["request_rate"] == LOAD.request_rate
