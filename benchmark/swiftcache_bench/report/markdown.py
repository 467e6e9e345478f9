"""A comparison as a page of Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftcache_bench.report.cells import (
    NONE,
    in_digits,
    in_ms,
    in_percent,
    markdown_table,
)
from swiftcache_bench.report.document import PHASES, Document
from swiftcache_bench.statistics import lost_text


def comparison_page(document: Document, plots: Sequence[str]) -> str:
    """``document`` is of `comparison_document`; ``plots`` are file names beside the page."""
    parts = [
        f"# Comparison on {document['workload']['name']}",
        _incomplete(document),
        _circumstances(document),
        _contender_table(document),
    ]
    parts += [_run_section(document, label) for label in run_labels(document)]
    parts += [_probe_section(document)]
    parts += [f"![{name}]({name})" for name in plots]
    return "\n\n".join(part for part in parts if part) + "\n"


def run_labels(document: Document) -> list[str]:
    """What the runs are called, in order; each contender has at most one run of a label."""
    labels = (run["label"] for c in document["contenders"] for run in c["runs"])
    return list(dict.fromkeys(labels))


def runs_of(document: Document, label: str) -> list[tuple[str, Document]]:
    """(contender, its run of ``label``)."""
    return [
        (contender["name"], run)
        for contender in document["contenders"]
        for run in contender["runs"]
        if run["label"] == label
    ]


def _incomplete(document: Document) -> str:
    problems = []
    for contender in document["contenders"]:
        if contender["error"]:
            problems.append(f"- {contender['name']}: {contender['error']}")
        for run in contender["runs"]:
            if not run["complete"]:
                lost = lost_text(run["summary"])
                problems.append(f"- {contender['name']}, {run['label']}: {lost}")
            problems += [f"  - {count} x {error}" for error, count in run["errors"].items()]
        probe = contender["probe"]
        if probe is not None and not probe["complete"]:
            problems.append(f"- {contender['name']}: requests of the prefix probe failed")
    if not problems:
        return ""
    return "\n".join(["**Incomplete: figures leave out what failed.**", "", *problems])


def _circumstances(document: Document) -> str:
    machine, workload = document["machine"], document["workload"]
    notes = ", ".join(f"{name} {value}" for name, value in workload["notes"].items())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    gpus = "; ".join(machine["gpus"]) or "no GPU"
    memory_gib = machine["memory_bytes"] / 2**30
    sent = f"{workload['conversations']} conversations, {workload['requests']} requests"
    rows = [
        ("measured", " ".join([document["created"], document["tag"]]).strip()),
        ("command", f"`{document['command']}`"),
        ("commit", document["commit"]),
        ("machine", f"{machine['cpu']}, {machine['cpu_cores']} cores, {memory_gib:.0f} GiB"),
        ("GPUs", gpus),
        ("versions", versions),
        ("workload", f"{sent}, digest {workload['digest']}{', ' if notes else ''}{notes}"),
        ("baseline", document["baseline"]),
    ]
    return markdown_table(("", ""), rows)


def _contender_table(document: Document) -> str:
    rows = [
        (
            contender["name"],
            f"`{' '.join(contender['command'])}`" if contender["command"] else NONE,
            ", ".join(contender["donors"]) or NONE,
            in_digits(contender["pool_tokens"], 0),
        )
        for contender in document["contenders"]
    ]
    changed = [
        f"- {contender['name']} was asked for {flag} {asked} and runs {runs}"
        for contender in document["contenders"]
        for flag, asked, runs in (contender["flags"] or {"differing": []})["differing"]
    ]
    table = markdown_table(("", "command", "donors", "KV pool, tokens"), rows)
    return "\n\n".join(["## Contenders", table, *(["\n".join(changed)] if changed else [])])


def _run_section(document: Document, label: str) -> str:
    runs = runs_of(document, label)
    times = markdown_table(
        (
            "",
            "TTFT avg, ms",
            "P90",
            "P99",
            "P99 / baseline",
            "ITL avg, ms",
            "P99",
            "latency avg, s",
            "P99",
        ),
        (_time_row(name, run) for name, run in runs),
    )
    rates = markdown_table(
        (
            "",
            "answered",
            "not answered",
            "requests/s",
            "/ baseline",
            "input tokens/s",
            "output tokens/s",
            "hit rate",
            "device",
            "host",
            "outputs as baseline",
        ),
        (_rate_row(name, run) for name, run in runs),
    )
    return f"## {label}\n\n{times}\n\n{rates}\n\n{_round_table(runs)}"


def _time_row(name: str, run: Document) -> list[str]:
    summary = run["summary"]
    return [
        name,
        *(in_ms(summary[f"{kind}_ttft"]) for kind in ("average", "p90", "p99")),
        _ratio(run, "p99_ttft"),
        *(in_ms(summary[f"{kind}_itl"], 2) for kind in ("average", "p99")),
        *(in_digits(summary[f"{kind}_latency"], 2) for kind in ("average", "p99")),
    ]


def _rate_row(name: str, run: Document) -> list[str]:
    summary, against = run["summary"], run["against_baseline"]
    outputs = NONE
    if against is not None:
        same = against["outputs"]
        outputs = f"{same['same_output']} of {same['same_prompt']} with its prompt"
    return [
        name,
        str(summary["total_requests"]),
        lost_text(summary) or "0",
        in_digits(summary["throughput"], 3),
        _ratio(run, "throughput"),
        in_digits(summary["input_token_throughput"], 0),
        in_digits(summary["output_token_throughput"], 1),
        *(in_percent(summary[f"{place}_hit_rate"]) for place in ("cache", "device", "host")),
        outputs,
    ]


def _round_table(runs: Sequence[tuple[str, Document]]) -> str:
    rounds = list(dict.fromkeys(name for _, run in runs for name in run["round"]))
    heads = [f"{name.replace('_', ' ')}: TTFT avg / P99, ms; hit rate" for name in rounds]
    rows = [[name, *(_round_cell(run["round"].get(r)) for r in rounds)] for name, run in runs]
    return markdown_table(["", *heads], rows)


def _round_cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return NONE
    times = f"{in_ms(figures['average_ttft'])} / {in_ms(figures['p99_ttft'])}"
    return f"{times}; {in_percent(figures['cache_hit_rate'])}"


def _probe_section(document: Document) -> str:
    rows = []
    for contender in document["contenders"]:
        for row in (contender["probe"] or {"lengths": []})["lengths"]:
            rows.append(
                [
                    contender["name"],
                    str(row["length"]),
                    *(in_ms(row[f"{phase}_ttft"]) for phase in PHASES),
                    in_digits(row["evicted_device_tokens"], 0),
                    in_digits(row["evicted_host_tokens"], 0),
                    in_digits(row["evicted_to_device"], 3),
                    in_digits(row["evicted_to_baseline"], 3),
                    in_digits(row["cold_to_baseline"], 3),
                ]
            )
    if not rows:
        return ""
    heads = (
        "",
        "prefix, tokens",
        "cold TTFT, ms",
        "on the device",
        "pushed out of it",
        "then found on device",
        "in the tier",
        "pushed out / on device",
        "pushed out / baseline",
        "cold / baseline",
    )
    return "## One prefix at a time (medians)\n\n" + markdown_table(heads, rows)


def _ratio(run: Document, name: str) -> str:
    against = run["against_baseline"]
    return NONE if against is None else in_digits(against["ratios"][name], 3)
