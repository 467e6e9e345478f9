"""Tables in Markdown, and figures as their cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NONE = "-"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def in_ms(seconds: float | None, digits: int = 1) -> str:
    return NONE if seconds is None else in_digits(seconds * 1000, digits)


def in_percent(part: float | None) -> str:
    return NONE if part is None else f"{part:.1%}"


def in_digits(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
