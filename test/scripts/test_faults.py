"""Two rows of the fault matrix; `make test-faults` runs it all."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.__main__ import STAGES, stage_of
from faults.__main__ import main as faults
from faults.cell import Cell
from faults.faults import FAULTS
from faults.phases import PHASES, Tally
from faults.report import BEGIN, END, markdown, write_rows

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_donor_is_lost_while_prompts_are_restored_and_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--faults", "killed", "server-hangs", "--phases", "loading", "decoding"]
    assert faults(flags) == 0, "".join(capsys.readouterr())
    report = capsys.readouterr().out
    assert report.count("0 failed, 0 wrong, 0 leaks") == 4


def test_each_cell_has_a_server_but_copies_of_what_is_streamed() -> None:
    missing = [(f, p) for f in FAULTS for p in PHASES if stage_of(f, p) is None]
    assert missing == [(f, "streaming") for f in FAULTS if FAULTS[f].copies]
    assert {stage_of(f, p) for f in FAULTS for p in PHASES} - {None} == set(STAGES)


def test_a_cell_that_went_wrong_is_told() -> None:
    tally = Tally()
    tally.note("right", [1], lambda: [1])
    tally.note("wrong", [1], lambda: [2])
    tally.note("failed", [1], lambda: [][0])
    cell = Cell("killed", "idle", tally, ["a block is left"], 1.5)
    assert len(cell.problems) == 3
    [_, _, row] = markdown([cell]).splitlines()
    assert row == f"| {FAULTS['killed'].title} | 1.50 s | 1 of 3 | 1 | 1 |"


def test_rows_are_put_between_the_marks_and_those_of_other_faults_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")

    def cell(fault: str, seconds: float) -> Cell:
        return Cell(fault, "idle", Tally(answered=1), [], seconds)

    write_rows(page, [cell("stopped", 1.0), cell("leaves", 2.0)])
    write_rows(page, [cell("stopped", 3.0), cell("killed", 4.0)])
    table = markdown([cell("killed", 4.0), cell("stopped", 3.0), cell("leaves", 2.0)])
    assert page.read_text() == f"before\n{BEGIN}\n{table}{END}\nafter\n"
    with pytest.raises(ValueError, match="has no lines"):
        write_rows(REPOSITORY / "README.md", [cell("killed", 1.0)])


def test_a_row_that_is_not_whole_is_not_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(SystemExit):
        faults(["--phases", "idle", "--write", str(page)])
    assert not page.exists()


def test_the_page_has_a_row_for_each_fault_and_a_column_for_each_phase() -> None:
    table = (REPOSITORY / "docs/reliability.md").read_text().partition(BEGIN)[2].partition(END)[0]
    head, _, *rows = table.strip().splitlines()
    assert [cell.strip() for cell in head.split("|")[2 : 2 + len(PHASES)]] == list(PHASES)
    assert {row.split("|")[1].strip() for row in rows} == {f.title for f in FAULTS.values()}
