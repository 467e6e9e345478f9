"""What a run prints: progress while it goes, and its figures at the end."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from swiftcache_bench.records import RequestRecord
from swiftcache_bench.statistics import Figures, RunFigures, lost_text

PROGRESS_INTERVAL_S = 10.0
ERRORS_SHOWN_MAX = 5

_LENGTHS = (
    ("Average Prompt Length", "average_prompt_len"),
    ("P90 Prompt Length", "p90_prompt_len"),
    ("P99 Prompt Length", "p99_prompt_len"),
    ("Average Output Length", "average_output_len"),
)
_TIMES = ("ttft", "TTFT"), ("itl", "ITL"), ("latency", "latency")
_KINDS = (
    ("average", "Average"),
    ("median", "Median"),
    ("p90", "P90"),
    ("p99", "P99"),
    ("max", "Max"),
)
_RATES = (
    ("Input token throughput", "input_token_throughput", "tokens per second"),
    ("Output token throughput", "output_token_throughput", "tokens per second"),
    ("Request throughput", "throughput", "requests per second"),
)


class ProgressLines:
    """A line every 10 s, so that a log of a run that was cut off says how far it came."""

    def __init__(self, requests: int, out: TextIO = sys.stderr) -> None:
        self._requests = requests
        self._out = out
        self._ended = self._lost = 0
        self._last_s = time.monotonic()

    def __call__(self, record: RequestRecord) -> None:
        self._ended += 1
        self._lost += not record.ok
        now = time.monotonic()
        if now - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now
            line = f"{self._ended} of {self._requests} requests, {self._lost} of them not answered"
            print(line, file=self._out, flush=True)


def summary_lines(figures: RunFigures) -> list[str]:
    """The figures of a run in upstream's words, times in seconds."""
    summary = figures.summary
    lines = ["Performance metrics summary:"]
    lines.append(f"  Total requests: {summary['total_requests']}{_at_rate(summary)}")
    if summary["warmup_requests"]:
        lines.append(f"  Warm-up requests, not in the figures: {summary['warmup_requests']}")
    lines += [f"  {label}: {_text(summary[name], 0)} tokens" for label, name in _LENGTHS]
    for name, label in _TIMES:
        digits = 5 if name == "itl" else 4
        for key, kind in _KINDS:
            lines.append(f"  {kind} {label}: {_text(summary[f'{key}_{name}'], digits)} s")
    lines += [f"  {label}: {_text(summary[name], 2)} {unit}" for label, name, unit in _RATES]
    lines.append(
        f"  Cache Hit Rate: {_text(summary['cache_hit_rate'], 6)} "
        f"(device {_text(summary['device_hit_rate'], 6)}, "
        f"host {_text(summary['host_hit_rate'], 6)})"
    )
    lines.append("Per-round metrics:")
    lines += [_round_line(name, of_round) for name, of_round in figures.rounds.items()]
    return lines + lost_lines(figures)


def lost_lines(figures: RunFigures) -> list[str]:
    """What did not go as asked; nothing where all did."""
    if figures.complete:
        return []
    lost = lost_text(figures.summary)
    lines = [f"INCOMPLETE, the figures leave these requests out: {lost}"]
    shown = list(figures.errors.items())[:ERRORS_SHOWN_MAX]
    lines += [f"  {count} x {error}" for error, count in shown]
    if len(figures.errors) > len(shown):
        lines.append(f"  and {len(figures.errors) - len(shown)} other errors")
    return lines


def _round_line(name: str, figures: Figures) -> str:
    return (
        f"  {name.replace('_', ' ').capitalize()}: "
        f"Average TTFT = {_text(figures['average_ttft'], 4)} s, "
        f"P99 TTFT = {_text(figures['p99_ttft'], 4)} s, "
        f"Cache Hit Rate = {_text(figures['cache_hit_rate'], 6)} "
        f"({figures['request_count']} requests)"
    )


def _at_rate(summary: Figures) -> str:
    rate = summary["request_rate"]
    return "" if rate is None else f" at {rate:g} requests per second"


def _text(value: float | int | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"
