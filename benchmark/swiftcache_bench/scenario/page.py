"""Scenarios as Markdown: a table of times and one of rates each, and where a donor was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swiftcache_bench.against_baseline import ratio
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.report.cells import NONE, in_digits, in_ms, in_percent, markdown_table
from swiftcache_bench.scenario.document import Document
from swiftcache_bench.statistics import lost_text

TIME_HEADS = (
    "window",
    "variant",
    "server",
    "TTFT avg, ms",
    "P50",
    "P99",
    "TPOT avg, ms",
    "P50",
    "P99",
    "TTFT avg / base",
    "TTFT P99 / base",
    "TPOT avg / base",
    "TPOT P99 / base",
    "TTFT avg, each window",
)
RATE_HEADS = (
    "window",
    "variant",
    "server",
    "answered",
    "requests/s",
    "output tokens/s",
    "hit rate",
    "in the tier",
    "from donors, GB/s",
    "recomputed tokens",
    "outputs as base",
    "not counted",
)
LOSS_HEADS = (
    "window",
    "variant",
    "server",
    "TTFT P99 before, ms",
    "up to 10 s after",
    "later",
    "recomputed tokens",
    "lost blocks",
)


class _Row(NamedTuple):
    window: str
    variant: str
    server: str
    result: Document
    base: Document | None

    @property
    def names(self) -> list[str]:
        return [self.window, self.variant, self.server]


def scenario_section(document: Document) -> str:
    """``document`` is of `scenario_document`."""
    rows = list(_rows(document))
    parts = [f"## {document['title']}", _base(document["against"]), _problems(document)]
    if rows:
        parts += [
            markdown_table(TIME_HEADS, [_times(row) for row in rows]),
            markdown_table(RATE_HEADS, [_rates(row) for row in rows]),
        ]
    losses = [row for row in rows if row.result["loss"]]
    if losses:
        parts.append(markdown_table(LOSS_HEADS, [_loss(row) for row in losses]))
    return "\n\n".join(text for text in parts if text)


def _rows(document: Document) -> Iterator[_Row]:
    variants = document["variants"]
    names = list(dict.fromkeys(w for variant in variants.values() for w in variant["windows"]))
    for window in names:
        for name, variant in variants.items():
            for server, result in variant["windows"].get(window, {}).items():
                base = _base_of(document, name, window, server)
                yield _Row(window, name, server, result, base)


def _base_of(document: Document, variant: str, window: str, server: str) -> Document | None:
    against = document["against"]
    if not (against["variant"] or against["window"]):
        return None
    windows = document["variants"].get(against["variant"] or variant, {"windows": {}})["windows"]
    base: Document | None = windows.get(against["window"] or window, {}).get(server)
    return base


def _times(row: _Row) -> list[str]:
    summary = row.result["summary"]
    cells = [
        in_ms(summary[f"{kind}_{name}"])
        for name in ("ttft", "tpot")
        for kind in ("average", "median", "p99")
    ]
    ratios = [
        in_digits(None if row.base is None else ratio(summary[name], row.base["summary"][name]), 3)
        for name in ("average_ttft", "p99_ttft", "average_tpot", "p99_tpot")
    ]
    each = " / ".join(in_ms(seconds) for seconds in row.result["average_ttft_s"])
    return [*row.names, *cells, *ratios, each]


def _rates(row: _Row) -> list[str]:
    summary, tier = row.result["summary"], row.result["tier"] or {}
    seconds = row.result["seconds"]
    loaded = tier.get("loaded_bytes", 0)
    return [
        *row.names,
        in_digits(summary["total_requests"], 0),
        in_digits(summary["throughput"], 2),
        in_digits(summary["output_token_throughput"], 1),
        in_percent(summary["cache_hit_rate"]),
        in_percent(summary["host_hit_rate"]),
        in_digits(loaded / seconds / 1e9 if seconds and loaded else None, 3),
        in_digits(tier.get("recomputed_tokens"), 0),
        _same_outputs(row.result["outputs"]),
        _not_counted(row.result),
    ]


def _loss(row: _Row) -> list[str]:
    loss, tier = row.result["loss"], row.result["tier"] or {}
    times = [
        f"{in_ms(loss[name]['p99_ttft'])} ({loss[name]['requests']})"
        for name in ("before", "around", "after")
    ]
    counts = (tier.get("recomputed_tokens"), tier.get("lost_blocks"))
    return [*row.names, *times, *(in_digits(count, 0) for count in counts)]


def _same_outputs(outputs: Document | None) -> str:
    """Of the requests that had the same prompt in both."""
    return NONE if outputs is None else f"{outputs['same_output']} of {outputs['same_prompt']}"


def _not_counted(result: Document) -> str:
    lost = lost_text(result["summary"])
    cut = f"{result['left']} cut off by the limit" if result["left"] else ""
    return ", ".join(text for text in (lost, cut) if text) or "0"


def _base(against: Mapping[str, Any]) -> str:
    said = [f"{kind} `{name}`" for kind, name in against.items() if name]
    return f"Base of the ratios: {', '.join(said)}." if said else ""


def _problems(document: Document) -> str:
    lines: Sequence[str] = [
        f"- **not complete**, {name}: {variant['error']}"
        for name, variant in document["variants"].items()
        if variant["error"]
    ]
    return "\n".join(lines)


def report_page(documents: Sequence[Document]) -> str:
    """All of them under what they were measured with, which is that of the last."""
    if not documents:
        return ""
    sections = [
        scenario_section(document) if "variants" in document else _command_section(document)
        for document in documents
    ]
    return "\n\n".join([_circumstances(documents), *sections]) + "\n"


def write_between_marks(page: Path, name: str, text: str) -> None:
    """Replace what lies between `<!-- NAME: begin -->` and `<!-- NAME: end -->` in ``page``.

    Raises BenchmarkError when the marks are not there.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.read_text().partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise BenchmarkError(f"{page} has no lines {begin} and {end}: add them where tables go")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def _circumstances(documents: Sequence[Document]) -> str:
    last = documents[-1]
    machine = last["machine"]
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    commits = ", ".join(dict.fromkeys(str(document["commit"])[:12] for document in documents))
    return (
        f"Measured {last['created']}{' ' if last['tag'] else ''}{last['tag']} at commit {commits} "
        f"on {machine['cpu']}, {machine['cpu_cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, GPUs: {gpus}; {versions}."
    )


def _command_section(document: Document) -> str:
    problem = f"- **not complete**: {document['error']}" if document["error"] else ""
    said = [f"## {document['title']}", f"`{document['command_line']}`", problem, document["text"]]
    return "\n\n".join(text.strip() for text in said if text)
