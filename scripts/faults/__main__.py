"""The command line of the fault matrix: see the package. Exit code 1 if a cell failed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from demo.ending import clean_ending
from faults.cell import Cell, run_cell
from faults.engine_stage import EngineStage
from faults.faults import FAULTS
from faults.phases import PHASES
from faults.report import print_table, write_rows
from faults.stage import Stage
from support.tiny_model import build_tiny_model

STREAMING = ("--max-total-tokens", "512", "--swiftcache-layer-stream", "1024")


class StageKind(NamedTuple):
    """What the cells need."""

    stage: type[Stage]
    flags: Sequence[str] = ()
    """For the server."""


STAGES = {
    "plain": StageKind(Stage),
    "streaming": StageKind(Stage, STREAMING),
    "copies": StageKind(Stage, ("--swiftcache-replicas", "2", "--swiftcache-verify")),
    "engine": StageKind(EngineStage),
    "engine-streaming": StageKind(EngineStage, STREAMING),
}


def stage_of(fault: str, phase: str) -> str | None:
    """The server on which this cell is tried; None where there can be none: what is streamed has
    no copies."""
    if FAULTS[fault].copies:
        return None if phase == "streaming" else "copies"
    if FAULTS[fault].engine:
        return "engine-streaming" if phase == "streaming" else "engine"
    return "streaming" if phase == "streaming" else "plain"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="faults", description="Try each fault in each phase of a server."
    )
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="put the rows into the table of this page; rows of other faults stay",
    )
    given = parser.parse_args(arguments)
    if given.write is not None and set(given.phases) != set(PHASES):
        parser.error("--write puts whole rows into a page, so leave --phases out")
    cells: list[Cell] = []
    with clean_ending(), tempfile.TemporaryDirectory(prefix="sc-faults-") as name:
        scratch = Path(name)
        model = build_tiny_model(scratch / "model")
        for kind, (stage_class, flags) in STAGES.items():
            chosen = [
                (fault, phase)
                for fault in given.faults
                for phase in given.phases
                if stage_of(fault, phase) == kind
            ]
            if not chosen:
                continue
            (scratch / kind).mkdir()
            with stage_class(model, scratch / kind, *flags) as stage:
                for fault, phase in chosen:
                    cells.append(run_cell(stage, fault, FAULTS[fault], phase))
                    _say(cells[-1])
    print_table(cells)
    if given.write is not None:
        write_rows(given.write, cells)
    failed = [cell for cell in cells if cell.problems]
    print("failed" if failed else "passed", flush=True)
    return 1 if failed else 0


def _say(cell: Cell) -> None:
    print(
        f"{cell.fault} while {cell.phase}: {cell.tally.answered} answered, "
        f"{len(cell.tally.failed)} failed, {len(cell.tally.wrong)} wrong, {len(cell.leaks)} leaks, "
        f"over after {cell.recovery_s:.2f} s",
        flush=True,
    )
    for problem in cell.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
