"""The result of a comparison as one plain document, from which every other form is made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from swiftcache_bench.against_baseline import ratio, ratios, same_outputs
from swiftcache_bench.comparison import ContenderOutcome, Plan, RunOutcome, describe_load
from swiftcache_bench.load import LoadSettings
from swiftcache_bench.prefix_probe import Phase, ProbeRecord, ProbeResult, phase_times_s
from swiftcache_bench.records import RequestRecord

Document = dict[str, Any]

PHASES: tuple[Phase, ...] = ("cold", "device", "evicted")


def comparison_document(
    run: dict[str, object], plan: Plan, outcomes: Sequence[ContenderOutcome], baseline: str
) -> Document:
    """``run`` is of `describe_run`. Figures of ``baseline`` are what the ratios are taken to."""
    base = next((outcome for outcome in outcomes if outcome.name == baseline), None)
    workload = plan.workload
    return {
        **run,
        "workload": {
            "name": workload.name,
            "notes": workload.notes,
            "conversations": len(workload.conversations),
            "requests": workload.requests,
            "digest": workload.digest(),
        },
        "baseline": baseline,
        "complete": all(outcome.complete for outcome in outcomes),
        "contenders": [_contender(outcome, base) for outcome in outcomes],
    }


def write_document(path: Path, document: Document) -> None:
    """As indented JSON; replaces ``path`` at once, so that a reader never finds half of it."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    partial.replace(path)


def _contender(outcome: ContenderOutcome, base: ContenderOutcome | None) -> Document:
    return {
        "name": outcome.name,
        "complete": outcome.complete,
        "error": outcome.error,
        "command": outcome.command,
        "donors": outcome.donors,
        "flags": None if outcome.flags is None else asdict(outcome.flags),
        "pool_tokens": outcome.pool_tokens,
        "runs": [_run(run, _of_load(base, run.load)) for run in outcome.runs],
        "probe": _probe(outcome.probe, base.probe if base is not None else None),
    }


def _run(run: RunOutcome, base: RunOutcome | None) -> Document:
    against = None
    if base is not None:
        against = {
            "ratios": ratios(run.figures.summary, base.figures.summary),
            "outputs": same_outputs(run.requests, base.requests)._asdict(),
        }
    return {
        "label": describe_load(run.load),
        "load": _load(run.load),
        "complete": run.figures.complete,
        "summary": run.figures.summary,
        "round": run.figures.rounds,
        "errors": run.figures.errors,
        "against_baseline": against,
        "requests": [_request(request) for request in run.requests],
    }


def _probe(probe: ProbeResult | None, base: ProbeResult | None) -> Document | None:
    if probe is None:
        return None
    lengths = sorted({record.length for record in probe.records})
    base_records = base.records if base is not None else []
    return {
        "complete": probe.complete,
        "fillers": probe.fillers,
        "failed_fillers": probe.failed_fillers,
        "lengths": [_probed_length(probe.records, base_records, length) for length in lengths],
        "requests": [
            {"length": r.length, "repeat": r.repeat, "phase": r.phase, **_request(r.request)}
            for r in probe.records
        ],
    }


def _probed_length(
    records: Sequence[ProbeRecord], base_records: Sequence[ProbeRecord], length: int
) -> Document:
    """Median TTFTs of a length in seconds, where the tokens were, and the ratios asked of them."""
    row: Document = {"length": length}
    for phase in PHASES:
        mine = _median(phase_times_s(records, length, phase))
        theirs = _median(phase_times_s(base_records, length, phase))
        row[f"{phase}_ttft"] = mine
        row[f"{phase}_to_baseline"] = ratio(mine, theirs)
        of_phase = [r.request for r in records if r.length == length and r.phase == phase]
        for place in ("device", "host"):
            tokens = [getattr(request, f"{place}_tokens") for request in of_phase if request.ok]
            row[f"{phase}_{place}_tokens"] = _median(tokens)
    row["evicted_to_device"] = ratio(row["evicted_ttft"], row["device_ttft"])
    return row


def _of_load(base: ContenderOutcome | None, load: LoadSettings) -> RunOutcome | None:
    runs = base.runs if base is not None else []
    return next((run for run in runs if run.load == load), None)


def _load(load: LoadSettings) -> Document:
    # JSON has no infinity, and orjson would write null.
    rate = "inf" if math.isinf(load.request_rate) else load.request_rate
    return asdict(load) | {"request_rate": rate}


def _request(request: RequestRecord) -> Document:
    """A request without its gaps between tokens: of long answers they would be most of the file."""
    fields = asdict(request)
    del fields["itl_s"]
    return fields


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None
