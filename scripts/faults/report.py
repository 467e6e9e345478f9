"""The matrix as a table, on the screen and in a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from faults.cell import Cell
from faults.faults import FAULTS

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def print_table(cells: Sequence[Cell]) -> None:
    """A row for each fault, a column for each phase, each cell its time to recover."""
    phases = _phases(cells)
    table = Table("FAULT", *(phase.upper() for phase in phases), "FAILED", "WRONG", "LEAKS")
    for row in _rows(cells):
        table.add_row(*row)
    Console(width=160).print(table)


def markdown(cells: Sequence[Cell]) -> str:
    """The same as a table in a page."""
    heads = [
        "fault",
        *_phases(cells),
        "requests failed",
        "wrong answers",
        "leaks",
    ]
    lines = [heads, ["---"] * len(heads), *_rows(cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_rows(page: Path, cells: Sequence[Cell]) -> None:
    """Put the rows into the table between the marks of `page`, in the order of FAULTS.

    Rows there of faults that `cells` does not have stay as they are. Raises ValueError.
    """
    before, found, rest = page.read_text().partition(BEGIN)
    old, ended, after = rest.partition(END)
    if not (found and ended):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}: add them where the table goes")
    head, rule, *new = markdown(cells).splitlines()
    rows = {_title(row): row for row in (*old.strip().splitlines()[2:], *new)}
    ordered = [rows[fault.title] for fault in FAULTS.values() if fault.title in rows]
    page.write_text("\n".join([f"{before}{BEGIN}", head, rule, *ordered, f"{END}{after}"]))


def _title(row: str) -> str:
    return row.split("|")[1].strip()


def _phases(cells: Iterable[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.phase for cell in cells))


def _rows(cells: Sequence[Cell]) -> list[list[str]]:
    rows = []
    for fault in dict.fromkeys(cell.fault for cell in cells):
        own = {cell.phase: cell for cell in cells if cell.fault == fault}
        answered = sum(cell.tally.answered for cell in own.values())
        failed = sum(len(cell.tally.failed) for cell in own.values())
        rows.append(
            [
                FAULTS[fault].title,
                *(
                    f"{own[phase].recovery_s:.2f} s" if phase in own else "-"
                    for phase in _phases(cells)
                ),
                f"{failed} of {answered + failed}",
                str(sum(len(cell.tally.wrong) for cell in own.values())),
                str(sum(len(cell.leaks) for cell in own.values())),
            ]
        )
    return rows
