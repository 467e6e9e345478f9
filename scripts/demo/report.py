"""The demo's closing table: what the donors changed, in tokens and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from demo.asking import Answer


@dataclass(frozen=True)
class Verdict:
    """Whether the demo showed what it is meant to show."""

    identical_turns: int
    turns: int
    restored_tokens: int

    @property
    def good(self) -> bool:
        return self.identical_turns == self.turns > 0 and self.restored_tokens > 0


def judge(with_donors: Sequence[Answer], without: Sequence[Answer]) -> Verdict:
    """Compare two runs turn by turn; a turn is identical when all its token ids are."""
    pairs = zip(with_donors, without, strict=True)
    return Verdict(
        identical_turns=sum(a.output_ids == b.output_ids for a, b in pairs),
        turns=len(with_donors),
        restored_tokens=sum(answer.donor_tokens for answer in with_donors),
    )


def print_summary(
    console: Console, with_donors: Sequence[Answer], without: Sequence[Answer], first_turns: int
) -> Verdict:
    """Print the table and the verdict. The first ``first_turns`` answers of a run had no prefix."""
    verdict = judge(with_donors, without)
    later, later_without = with_donors[first_turns:], without[first_turns:]
    table = Table(title=f"The {len(later)} later turns", title_justify="left", min_width=72)
    table.add_column()
    for heading in ("with donors", "without", "ratio"):
        table.add_column(heading, justify="right")
    for label, count in _TOKEN_ROWS:
        tokens, other = sum(map(count, later)), sum(map(count, later_without))
        ratio = f"{tokens / other:.2f}" if tokens and other else ""
        table.add_row(label, f"{tokens:,}", f"{other:,}", ratio)
    table.add_section()
    ttft, ttft_without = (np.array([x.ttft_s for x in run]) for run in (later, later_without))
    for label, statistic in _TTFT_ROWS:
        a, b = statistic(ttft), statistic(ttft_without)
        table.add_row(f"{label} time to first token", f"{a:.3f} s", f"{b:.3f} s", f"{a / b:.2f}")
    console.print(table)
    same = verdict.identical_turns == verdict.turns
    console.print(
        f"output identical: {'[green]yes' if same else '[red]no'}[/] "
        f"({verdict.identical_turns} of {verdict.turns} turns)\n"
        f"restored from donors: {verdict.restored_tokens:,} tokens",
        highlight=False,
    )
    return verdict


_TOKEN_ROWS: tuple[tuple[str, Callable[[Answer], int]], ...] = (
    ("prompt tokens", lambda answer: answer.prompt_tokens),
    ("  found on the device", lambda answer: answer.device_tokens),
    ("  restored from donors", lambda answer: answer.donor_tokens),
    ("  recomputed", lambda answer: answer.recomputed_tokens),
)
_TTFT_ROWS: tuple[tuple[str, Callable[[np.ndarray], float]], ...] = (
    ("mean", lambda seconds: float(seconds.mean())),
    ("P50", lambda seconds: float(np.percentile(seconds, 50))),
    ("P99", lambda seconds: float(np.percentile(seconds, 99))),
)
