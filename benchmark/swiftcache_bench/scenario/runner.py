"""Puts the variants of a scenario through its windows, and keeps what came of it."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.flags import build_workload, load_settings
from swiftcache_bench.load import LoadResult
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.scenario.file import (
    Scenario,
    ScenarioFile,
    Variant,
    Window,
    load_flags,
    parse_load,
)
from swiftcache_bench.scenario.fleet import Fleet
from swiftcache_bench.scenario.together import Event, Load, Together, run_together
from swiftcache_bench.statistics import RunFigures, run_figures
from swiftcache_bench.workload.base import Workload

WARM_UP_CONVERSATIONS = 2
WARM_UP_ROUNDS = 2
WARM_UP_SEED = 0x5EED

# Flags that a workload does not depend on; the first is a list.
_WHEN = frozenset({"request_rate", "arrivals", "max_parallel"})

Log = Callable[[str], None]


class TierChange(NamedTuple):
    """What a receiver's tier did during the measured part of a window."""

    loaded_bytes: int
    stored_bytes: int
    recomputed_tokens: int
    lost_blocks: int


@dataclass
class ServerWindow:
    """One server in the windows of one name: `seconds`, and requests `left` at the limit, added.

    `average_ttft_s` of each of them: how far they lie apart is noise.
    """

    records: list[RequestRecord] = field(default_factory=list)
    average_ttft_s: list[float | None] = field(default_factory=list)
    seconds: float = 0.0
    left: int = 0
    tier: TierChange | None = None
    event_s: float | None = None

    @property
    def figures(self) -> RunFigures:
        return run_figures(LoadResult(self.records, 0), None)


@dataclass
class VariantOutcome:
    """Windows by name, then server. `error` says why the variant ended early."""

    windows: dict[str, dict[str, ServerWindow]] = field(default_factory=dict)
    error: str | None = None


class Budget:
    """What is left of the time that a whole run may take."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end - time.monotonic()

    def require(self, seconds: float, what: str) -> None:
        """Raises BenchmarkError where less is left."""
        if self.left_s() < seconds:
            raise BenchmarkError(
                f"{what} was left out: it takes up to {seconds:.0f} s, and "
                f"{max(0.0, self.left_s()):.0f} s of the budget are left"
            )


def run_variant(
    variant: Variant, scenario: Scenario, file: ScenarioFile, folder: Path, budget: Budget, log: Log
) -> VariantOutcome:
    """Start `variant`, run all windows, end it. What went wrong is in the outcome."""
    outcome = VariantOutcome()
    try:
        budget.require(file.expected_start_s + scenario.windows[0].limit_s, folder.name)
        with Fleet(variant, file, folder) as fleet:
            log(f"{folder.name}: starting {', '.join(variant.servers)} (logs: {folder})")
            fleet.start()
            _warm_up(fleet, scenario, file)
            for window in scenario.windows:
                budget.require(window.limit_s, f"window {window.name!r} of {folder.name}")
                log(f"{folder.name}: {window.name}")
                _run_window(fleet, window, file, outcome)
    except BenchmarkError as error:
        outcome.error = str(error)
        log(f"{folder.name}: {error}")
    return outcome


def _warm_up(fleet: Fleet, scenario: Scenario, file: ScenarioFile) -> None:
    """The first conversations of each server's load: what compiles at first use has compiled.

    Raises BenchmarkError when one of these requests fails.
    """
    loads: dict[str, str] = {}
    for window in scenario.windows:
        loads = {**window.background, **window.loads, **loads}
    for server, name in loads.items():
        args = parse_load(file.loads[name])
        args.num_clients, args.num_rounds = WARM_UP_CONVERSATIONS, WARM_UP_ROUNDS
        args.seed, args.warm_first_round = WARM_UP_SEED, False
        args.arrivals, args.request_rate = "ready-queue", [float("inf")]
        load = _load(fleet, server, args)
        limit_s = file.start_timeout_s
        sent = asyncio.run(run_together({server: load}, {}, limit_s, args.request_timeout_s))
        failed = [record.error for record in sent.records[server] if not record.ok]
        if failed or sent.cut:
            why = failed[0] if failed else f"not through after {limit_s:g} s"
            raise BenchmarkError(f"the warm-up of {server!r} failed: {why}")


def _run_window(fleet: Fleet, window: Window, file: ScenarioFile, outcome: VariantOutcome) -> None:
    fleet.flush()
    loads = {
        server: _load(fleet, server, parse_load(load_flags(file, window, name, background=False)))
        for server, name in window.loads.items()
    }
    background = {
        server: _load(fleet, server, parse_load(load_flags(file, window, name, background=True)))
        for server, name in window.background.items()
    }
    before: dict[str, TierChange] = {}

    def begun() -> None:
        before.update({name: _tier(fleet, name) for name in (*loads, *background)})

    loss = window.lose
    event = None
    if loss is not None:
        event = Event(loss.after_s, lambda: fleet.kill_donor(loss.donor))
    timeout_s = max(window.limit_s, 60.0)
    together = asyncio.run(run_together(loads, background, window.limit_s, timeout_s, event, begun))
    into = outcome.windows.setdefault(window.name, {})
    for name in (*loads, *background):
        after = _tier(fleet, name)
        change = TierChange(*(b - a for a, b in zip(before.get(name, after), after, strict=True)))
        _add(into.setdefault(name, ServerWindow()), name, together, change, name in loads)


def _add(
    into: ServerWindow, server: str, together: Together, change: TierChange, counts: bool
) -> None:
    """Windows of one name follow each other on one clock."""
    alone = run_figures(LoadResult(together.records[server], 0), None)
    into.average_ttft_s.append(alone.summary["average_ttft"])
    into.records += [
        replace(record, due_s=record.due_s + into.seconds, sent_s=record.sent_s + into.seconds)
        for record in together.records[server]
    ]
    if together.event_s is not None:
        into.event_s = into.seconds + together.event_s
    into.seconds += together.seconds
    into.left += together.left if counts else 0
    before = into.tier or TierChange(0, 0, 0, 0)
    into.tier = TierChange(*(a + b for a, b in zip(before, change, strict=True)))


def _tier(fleet: Fleet, server: str) -> TierChange:
    tier: dict[str, Any] = fleet.tier(server)
    moved = tier.get("bytes") or {}
    lost = tier.get("lost_blocks", 0)
    return TierChange(
        moved.get("loaded", 0),
        moved.get("stored", 0),
        tier.get("recomputed_tokens", 0),
        sum(lost.values()) if isinstance(lost, dict) else lost,
    )


def _load(fleet: Fleet, server: str, args: Namespace) -> Load:
    sent = {name: value for name, value in vars(args).items() if name not in _WHEN}
    workload = _workload(fleet.model_path(server), tuple(sorted(sent.items())))
    rate = args.request_rate[0] if args.request_rate else 1.0
    return Load(fleet.url(server), workload, load_settings(args, workload, rate))


@lru_cache(maxsize=32)
def _workload(model_path: str, flags: tuple[tuple[str, Any], ...]) -> Workload:
    """The same requests for every variant, built once: tokenising a data set takes seconds."""
    return build_workload(Namespace(**dict(flags)), model_path)
