"""Figures of a run: distributions of times and lengths, rates, cache hits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from swiftcache_bench.client import Status
from swiftcache_bench.load import LoadResult
from swiftcache_bench.records import RequestRecord

Figures = dict[str, float | int | None]
"""Named figures; None where there was nothing to measure (never 0 for want of data)."""

_LOST = {
    "failed_requests": "failed",
    "aborted_requests": "aborted",
    "timed_out_requests": "timed out",
    "skipped_requests": "never sent, after one before them failed",
}


@dataclass(frozen=True)
class RunFigures:
    """All figures of a run. Names are upstream's where it has the figure. Times in seconds."""

    summary: Figures
    rounds: dict[str, Figures]
    errors: dict[str, int]

    @property
    def complete(self) -> bool:
        """Whether every request, warm-up included, was answered whole."""
        return not lost_text(self.summary)


def run_figures(result: LoadResult, request_rate: float | None) -> RunFigures:
    """Figures of the measured requests; failures are counted over all, warm-up too.

    ``request_rate`` is the rate that was asked for, None where the data set gave the times.
    """
    measured = [record for record in result.records if record.measured]
    rounds = sorted({record.round for record in measured})
    counts = Counter(record.status for record in result.records)
    summary: Figures = {
        "total_requests": sum(record.ok for record in measured),
        "failed_requests": counts[Status.FAILED],
        "aborted_requests": counts[Status.ABORTED],
        "timed_out_requests": counts[Status.TIMED_OUT],
        "skipped_requests": result.skipped,
        "warmup_requests": len(result.records) - len(measured),
        "request_rate": request_rate,
    }
    errors = Counter(record.error for record in result.records if record.error is not None)
    return RunFigures(
        summary=summary | _figures(measured),
        rounds={
            f"round_{number}": _figures([r for r in measured if r.round == number])
            for number in rounds
        },
        errors=dict(errors.most_common()),
    )


def lost_text(summary: Figures) -> str:
    """How many requests of a run were not answered whole, by kind; empty where all were."""
    return ", ".join(f"{summary[name]} {what}" for name, what in _LOST.items() if summary[name])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest of ``values``, as numpy has it; None of no values."""
    return float(np.percentile(values, percent)) if len(values) else None


def _figures(records: Sequence[RequestRecord]) -> Figures:
    """Of the requests that were answered whole."""
    done = [record for record in records if record.ok]
    figures: Figures = {"request_count": len(done)}
    figures |= _distribution("prompt_len", [r.prompt_tokens for r in done])
    figures |= _distribution("output_len", [r.output_tokens for r in done])
    figures |= _distribution("ttft", _given(r.ttft_s for r in done))
    figures |= _distribution("itl", [gap for r in done for gap in r.itl_s])
    figures |= _distribution("tpot", _given(r.tpot_s for r in done))
    figures |= _distribution("latency", _given(r.latency_s for r in done))
    figures |= _throughput(done)
    figures |= _cache(done)
    figures["max_client_delay"] = max((r.sent_s - r.due_s for r in done), default=None)
    return figures


def _distribution(name: str, values: Sequence[float]) -> Figures:
    return {
        f"average_{name}": float(np.mean(values)) if len(values) else None,
        f"median_{name}": percentile(values, 50),
        f"p90_{name}": percentile(values, 90),
        f"p99_{name}": percentile(values, 99),
        f"max_{name}": float(max(values)) if len(values) else None,
    }


def _throughput(done: Sequence[RequestRecord]) -> Figures:
    """Per second of the time from the first request's due time to the last one's end."""
    ends = _given(record.finished_s for record in done)
    duration_s = max(ends) - min(record.due_s for record in done) if ends else 0.0
    if duration_s <= 0:
        return dict.fromkeys(
            ("duration", "input_token_throughput", "output_token_throughput", "throughput")
        )
    return {
        "duration": duration_s,
        "input_token_throughput": sum(r.prompt_tokens for r in done) / duration_s,
        "output_token_throughput": sum(r.output_tokens for r in done) / duration_s,
        "throughput": len(done) / duration_s,
    }


def _cache(done: Sequence[RequestRecord]) -> Figures:
    """Hit tokens, and their part of all prompt tokens: in all, on the device, in the tier below."""
    prompt = sum(record.prompt_tokens for record in done)
    hits = {
        "cache": sum(record.cached_tokens for record in done),
        "device": sum(record.device_tokens for record in done),
        "host": sum(record.host_tokens for record in done),
    }
    figures: Figures = {}
    for name, tokens in hits.items():
        figures[f"{name}_hit_tokens"] = tokens
        figures[f"{name}_hit_rate"] = tokens / prompt if prompt else None
    return figures


def _given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
