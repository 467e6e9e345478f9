"""Figures of a run: right for known requests, none where nothing was measured, failures counted."""

from __future__ import annotations

import pytest
from benchmark.made_up import failed, record
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_bench.client import Status
from swiftcache_bench.load import LoadResult
from swiftcache_bench.statistics import RunFigures, percentile, run_figures

finite = st.floats(0, 1e6)


def figures_of(*records, skipped: int = 0) -> RunFigures:  # type: ignore[no-untyped-def]
    return run_figures(LoadResult(list(records), skipped), 2.0)


@given(values=st.lists(finite, min_size=1, max_size=50), percent=st.floats(0, 100))
def test_a_percentile_lies_among_the_values(values: list[float], percent: float) -> None:
    result = percentile(values, percent)
    assert result is not None
    assert min(values) <= result <= max(values)
    below = sum(value <= result for value in values)
    assert below >= percent / 100 * (len(values) - 1)


def test_percentiles_are_linear_between_values() -> None:
    values = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert percentile(values, 50) == 30
    assert percentile(values, 90) == pytest.approx(46)
    assert percentile([7.0], 99) == 7
    assert percentile([], 50) is None


def test_times_are_of_the_requests_that_were_answered() -> None:
    times = [1.0, 2.0, 3.0, 6.0]
    done = [record(i, ttft_s=t, latency_s=t + 1) for i, t in enumerate(times)]
    summary = figures_of(*done, failed(9, ttft_s=100.0)).summary
    assert summary["average_ttft"] == 3.0
    assert summary["median_ttft"] == 2.5
    assert summary["max_ttft"] == 6.0
    assert summary["average_latency"] == 4.0
    assert summary["average_itl"] == 0.5
    assert summary["total_requests"] == 4


def test_throughput_is_over_the_time_from_first_due_to_last_token() -> None:
    one = record(0, due_s=10.0, latency_s=1.0, prompt_tokens=100, output_tokens=4)
    two = record(1, due_s=12.0, latency_s=2.0, prompt_tokens=300, output_tokens=8)
    summary = figures_of(one, two).summary
    assert summary["duration"] == 4.0
    assert summary["throughput"] == 0.5
    assert summary["input_token_throughput"] == 100
    assert summary["output_token_throughput"] == 3


def test_hit_rates_are_of_prompt_tokens_and_by_place() -> None:
    hit = record(0, prompt_tokens=100, cached_tokens=60, device_tokens=20, host_tokens=40)
    miss = record(1, prompt_tokens=300)
    summary = figures_of(hit, miss).summary
    assert summary["cache_hit_rate"] == 0.15
    assert summary["device_hit_rate"] == 0.05
    assert summary["host_hit_rate"] == 0.1
    assert summary["host_hit_tokens"] == 40


def test_rounds_have_figures_of_their_own() -> None:
    figures = figures_of(
        record(0, 0, ttft_s=1.0), record(0, 1, ttft_s=3.0), record(1, 0, ttft_s=2.0)
    )
    assert list(figures.rounds) == ["round_0", "round_1"]
    assert figures.rounds["round_0"]["average_ttft"] == 1.5
    assert figures.rounds["round_0"]["request_count"] == 2
    assert figures.rounds["round_1"]["average_ttft"] == 3.0


def test_warm_up_is_counted_and_left_out_of_the_figures() -> None:
    figures = figures_of(record(0, 0, measured=False, ttft_s=50.0), record(0, 1, ttft_s=1.0))
    assert figures.summary["max_ttft"] == 1.0
    assert figures.summary["warmup_requests"] == 1
    assert figures.summary["total_requests"] == 1
    assert figures.complete
    assert list(figures.rounds) == ["round_1"]


@pytest.mark.parametrize(
    ("lost", "name"),
    [
        (failed(1), "failed_requests"),
        (failed(1, status=Status.ABORTED), "aborted_requests"),
        (failed(1, status=Status.TIMED_OUT), "timed_out_requests"),
        (failed(1, measured=False), "failed_requests"),
    ],
)
def test_a_lost_request_is_counted_by_kind(lost, name: str) -> None:  # type: ignore[no-untyped-def]
    figures = figures_of(record(0), lost)
    assert figures.summary[name] == 1
    assert not figures.complete
    assert figures.errors == {"went wrong": 1}


def test_requests_never_sent_make_a_run_incomplete() -> None:
    assert not figures_of(record(0), skipped=2).complete
    assert figures_of(record(0)).complete


@pytest.mark.parametrize("records", [[], [failed(0)]])
def test_where_nothing_was_measured_there_is_no_figure(records) -> None:  # type: ignore[no-untyped-def]
    summary = figures_of(*records).summary
    for name in ("average_ttft", "p99_ttft", "average_itl", "throughput", "cache_hit_rate"):
        assert summary[name] is None, name


def test_what_the_client_was_late_is_shown() -> None:
    summary = figures_of(record(0, due_s=1.0, sent_s=1.25), record(1)).summary
    assert summary["max_client_delay"] == 0.25
