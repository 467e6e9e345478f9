"""A contender's figures against those of another, from the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_bench.records import RequestRecord
from swiftcache_bench.statistics import Figures

RATIO_FIGURES = (
    "average_ttft",
    "median_ttft",
    "p90_ttft",
    "p99_ttft",
    "average_itl",
    "p99_itl",
    "average_latency",
    "p99_latency",
    "input_token_throughput",
    "output_token_throughput",
    "throughput",
)


class SameOutputs(NamedTuple):
    """Of ``answered`` requests that both answered: those with one prompt, and one output too.

    The prompts of a conversation's later turns hold earlier answers, so they part once these do.
    """

    answered: int
    same_prompt: int
    same_output: int


def ratios(figures: Figures, baseline: Figures) -> Figures:
    """``figures`` / ``baseline`` for times and throughputs; None where either is missing or 0."""
    return {name: ratio(figures[name], baseline[name]) for name in RATIO_FIGURES}


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def same_outputs(
    requests: Sequence[RequestRecord], baseline: Sequence[RequestRecord]
) -> SameOutputs:
    """How many greedy outputs are, token for token, those of the baseline."""
    theirs = {(r.conversation, r.round): r for r in baseline if r.ok}
    pairs = [
        (mine, theirs[mine.conversation, mine.round])
        for mine in requests
        if mine.ok and (mine.conversation, mine.round) in theirs
    ]
    same_prompt = [(a, b) for a, b in pairs if a.prompt_digest == b.prompt_digest]
    same_output = sum(a.output_digest == b.output_digest for a, b in same_prompt)
    return SameOutputs(len(pairs), len(same_prompt), same_output)
