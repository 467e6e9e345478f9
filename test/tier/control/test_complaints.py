"""Complaints about peers are logged once a second."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.control.complaints import Complaints


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Lines:
    return Lines()


def complaints_into(lines: Lines, clock: list[float]) -> Complaints:
    logger = logging.Logger("test")
    logger.addHandler(lines)
    return Complaints(logger, interval_s=1.0, clock=lambda: clock[0])


def test_one_line_for_each_peer_and_second(lines: Lines) -> None:
    clock = [0.0]
    complaints = complaints_into(lines, clock)
    for now_s in (0.0, 0.1, 0.9, 1.5, 1.6):
        clock[0] = now_s
        complaints.note("a", f"a at {now_s}")
        complaints.note("b", f"b at {now_s}")
    assert lines.lines == [
        "a at 0.0",
        "b at 0.0",
        "a at 1.5 (and 2 more like it since the last line)",
        "b at 1.5 (and 2 more like it since the last line)",
    ]


@given(
    steps=st.lists(st.tuples(st.floats(0, 0.2), st.integers(0, 500)), max_size=300),
)
def test_however_many_peers_there_are(steps: list[tuple[float, int]]) -> None:
    lines, clock = Lines(), [0.0]
    complaints = complaints_into(lines, clock)
    seen = 0
    for wait_s, peer in steps:
        clock[0] += wait_s
        complaints.note(peer, "nonsense")
        seen += 1
    # Those beyond the first 64 of a second share one line.
    assert len(lines.lines) <= 65 * (1 + int(clock[0]))
    assert bool(lines.lines) == bool(seen)
