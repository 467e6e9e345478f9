"""One fault in one phase."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from faults.engine_stage import EngineStage
from faults.faults import Fault
from faults.phases import PHASES, Missed, Tally
from faults.stage import DEADLINE_S, LEAKED_FILES_MAX, SETTLE_INTERVAL_S, Stage
from support.processes import wait_until

TRIES = 5


@dataclass
class Cell:
    """What one fault cost in one phase. ``leaks`` holds a line for each thing left over."""

    fault: str
    phase: str
    tally: Tally = field(default_factory=Tally)
    leaks: list[str] = field(default_factory=list)
    recovery_s: float = 0.0

    @property
    def problems(self) -> list[str]:
        return [*self.tally.failed, *self.tally.wrong, *self.leaks]


def run_cell(stage: Stage, name: str, fault: Fault, phase: str) -> Cell:
    """Leaves the stage whole again. Raises AssertionError when it cannot be made so."""
    for _ in range(TRIES):
        stage.warm()
        cell = Cell(name, phase)
        try:
            with PHASES[phase](stage, Tally() if fault.ends_server else cell.tally):
                began_s = time.monotonic()
                fault.inject(stage)
                wait_until(
                    lambda: fault.recovered(stage),
                    DEADLINE_S,
                    f"the server has got over: {fault.title}",
                    SETTLE_INTERVAL_S,
                )
                cell.recovery_s = time.monotonic() - began_s
            break
        except Missed:
            continue
    else:
        raise AssertionError(f"{phase}: over before the fault could come, {TRIES} times")
    if fault.ends_server:
        fault.repair(stage)
    # What lay on the victim is recomputed or read from a copy; both must be right.
    for i, (prompt, expected) in enumerate(zip(stage.prompts, stage.expected, strict=True)):
        cell.tally.note(f"afterwards {i}", expected, lambda prompt=prompt: stage.ask(prompt))  # type: ignore[misc]
    if not fault.ends_server:
        fault.repair(stage)
    stage.settle()
    if isinstance(stage, EngineStage):
        # It has all its memory, in which whoever had a part of it has left no trace.
        for i, (prompt, expected) in enumerate(zip(stage.prompts, stage.expected, strict=True)):
            cell.tally.note(
                f"engine {i}",
                expected,
                lambda prompt=prompt: stage.ask_engine(prompt),  # type: ignore[misc]
            )
    cell.leaks += _leaks(stage)
    return cell


def _homes(tier: dict[str, Any]) -> int:
    """Blocks that the pages of a layer window always have."""
    if "layer_stream" not in tier:
        return 0
    window = tier["layer_stream"]["window_slots"]
    return int((window["total"] - window["retired"]) // tier["block_tokens"])


def _leaks(stage: Stage) -> list[str]:
    stage.server.flush(DEADLINE_S)
    found = []
    tier = stage.tier()
    if tier["blocks"]["used"] != _homes(tier) or tier["replicas"]["copies"]:
        found.append(f"donor blocks are in use after a flush: {tier['blocks']}")
    if tier["audits"]["found"]:
        found.append(f"an audit found: {tier['audits']['violated']}")
    files = stage.scheduler().num_fds()
    if files > stage.files_before + LEAKED_FILES_MAX:
        found.append(f"{files - stage.files_before} descriptors more than at the start")
    return found + (stage.engine_leaks() if isinstance(stage, EngineStage) else [])
