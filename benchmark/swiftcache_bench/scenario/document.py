"""What came of a scenario, as one plain document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftcache_bench.against_baseline import same_outputs
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.scenario.file import Scenario
from swiftcache_bench.scenario.runner import ServerWindow, VariantOutcome
from swiftcache_bench.statistics import percentile

Document = dict[str, Any]

AROUND_S = 10.0
"""How long after a loss counts as around it."""


def scenario_document(
    run: Mapping[str, object],
    scenario: Scenario,
    outcomes: Mapping[str, VariantOutcome],
    kept: Document | None = None,
) -> Document:
    """``run`` is of `describe_run`; of ``kept``, an earlier document, other variants stay."""
    variants = {
        name: {
            "error": outcome.error,
            "windows": {
                window: {
                    server: _server(result, _base(scenario, outcomes, window, server))
                    for server, result in servers.items()
                }
                for window, servers in outcome.windows.items()
            },
        }
        for name, outcome in outcomes.items()
    }
    everything = {**(kept["variants"] if kept is not None else {}), **variants}
    ordered = {name: everything[name] for name in scenario.variants if name in everything}
    return {
        **run,
        "title": scenario.title,
        "against": {"variant": scenario.against.variant, "window": scenario.against.window},
        "complete": all(variant["error"] is None for variant in ordered.values()),
        "variants": ordered,
    }


def _base(
    scenario: Scenario, outcomes: Mapping[str, VariantOutcome], window: str, server: str
) -> ServerWindow | None:
    """What another variant made of the same requests."""
    outcome = outcomes.get(scenario.against.variant or "")
    return outcome.windows.get(window, {}).get(server) if outcome is not None else None


def _server(result: ServerWindow, base: ServerWindow | None) -> Document:
    figures = result.figures
    outputs = None if base is None else same_outputs(result.records, base.records)
    return {
        "outputs": outputs and outputs._asdict(),
        "summary": figures.summary,
        "errors": figures.errors,
        "seconds": result.seconds,
        "average_ttft_s": result.average_ttft_s,
        "left": result.left,
        "tier": result.tier and result.tier._asdict(),
        "loss": _loss(result),
        "requests": [_request(record) for record in result.records],
    }


def _loss(result: ServerWindow) -> Document | None:
    """TTFT P99 in seconds of what was due before a loss, up to 10 s after it, and later."""
    if result.event_s is None:
        return None
    done = [record for record in result.records if record.measured and record.ttft_s is not None]
    at_s = result.event_s
    parts = {
        "before": [r for r in done if r.due_s < at_s],
        "around": [r for r in done if at_s <= r.due_s < at_s + AROUND_S],
        "after": [r for r in done if r.due_s >= at_s + AROUND_S],
    }
    return {"at_s": at_s} | {
        name: {
            "requests": len(records),
            "p99_ttft": percentile([r.ttft_s for r in records if r.ttft_s is not None], 99),
        }
        for name, records in parts.items()
    }


def _request(record: RequestRecord) -> Document:
    return {
        "due_s": record.due_s,
        "status": str(record.status),
        "measured": record.measured,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "prompt_tokens": record.prompt_tokens,
        "device_tokens": record.device_tokens,
        "host_tokens": record.host_tokens,
        "output_digest": record.output_digest,
    }
