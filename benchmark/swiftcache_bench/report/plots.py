"""Plots of a comparison, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.report.document import PHASES, Document
from swiftcache_bench.report.markdown import run_labels, runs_of

_SIZE_INCHES = (8.0, 5.0)
_DPI = 120
_PHASE_LINES = {"cold": ":", "device": "--", "evicted": "-"}


def write_plots(document: Document, folder: Path) -> list[str]:
    """Write PNG files into ``folder`` and return their names: for each run the TTFT's distribution,
    TTFT against prefix length and the hit rate; TTFT by length of the prefix probe.

    Raises BenchmarkError when matplotlib is not there.
    """
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise BenchmarkError(
            "plots are left out, matplotlib is not installed: pip install matplotlib"
        ) from None
    names = []
    for name, draw in _plots(document):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.subplots())
        figure.savefig(folder / name, dpi=_DPI)
        names.append(name)
    return names


def _plots(document: Document) -> Iterator[tuple[str, Any]]:
    labels = run_labels(document)
    for number, label in enumerate(labels):
        runs = runs_of(document, label)
        suffix = "" if len(labels) == 1 else f"_{number}"
        yield f"ttft_cdf{suffix}.png", lambda axes, r=runs, t=label: _ttft_cdf(axes, r, t)
        yield f"ttft_prefix{suffix}.png", lambda axes, r=runs, t=label: _ttft_prefix(axes, r, t)
        yield f"hit_rate{suffix}.png", lambda axes, r=runs, t=label: _hit_rate(axes, r, t)
    if any(contender["probe"] for contender in document["contenders"]):
        yield "ttft_probe.png", lambda axes: _probe(axes, document)


def _ttft_cdf(axes: Any, runs: list[tuple[str, Document]], title: str) -> None:
    for name, run in runs:
        times = np.sort([r["ttft_s"] for r in _answered(run)]) * 1000
        axes.step(
            times, np.arange(1, len(times) + 1) / max(1, len(times)), where="post", label=name
        )
    axes.set(
        title=title, xlabel="TTFT, ms", ylabel="part of requests", xscale="log", ylim=(0, 1.02)
    )
    _finish(axes)


def _ttft_prefix(axes: Any, runs: list[tuple[str, Document]], title: str) -> None:
    for name, run in runs:
        done = _answered(run)
        lengths = [r["prefix_tokens"] for r in done]
        axes.plot(lengths, [r["ttft_s"] * 1000 for r in done], ".", alpha=0.6, label=name)
    axes.set(title=title, xlabel="prefix sent before, tokens", ylabel="TTFT, ms", yscale="log")
    _finish(axes)


def _hit_rate(axes: Any, runs: list[tuple[str, Document]], title: str) -> None:
    names = [name for name, _ in runs]
    bottom = np.zeros(len(runs))
    for place, label in (("device", "on the device"), ("host", "in the tier below")):
        rates = np.array([run["summary"][f"{place}_hit_rate"] or 0.0 for _, run in runs])
        axes.bar(names, rates, bottom=bottom, label=label)
        bottom += rates
    axes.set(title=title, ylabel="part of prompt tokens", ylim=(0, 1))
    axes.tick_params(axis="x", rotation=20)
    _finish(axes)


def _probe(axes: Any, document: Document) -> None:
    for number, contender in enumerate(document["contenders"]):
        rows = (contender["probe"] or {"lengths": []})["lengths"]
        for phase in PHASES:
            points = [(r["length"], r[f"{phase}_ttft"]) for r in rows if r[f"{phase}_ttft"]]
            axes.plot(
                [length for length, _ in points],
                [ttft * 1000 for _, ttft in points],
                _PHASE_LINES[phase],
                marker="o",
                color=f"C{number}",
                label=f"{contender['name']}, {phase}",
            )
    axes.set(
        title="One prefix at a time",
        xlabel="prefix, tokens",
        ylabel="median TTFT, ms",
        yscale="log",
    )
    _finish(axes)


def _answered(run: Document) -> list[Document]:
    return [r for r in run["requests"] if r["measured"] and r["status"] == "ok"]


def _finish(axes: Any) -> None:
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
