"""A short run of the fuzzing; `python -m fuzz` is the long one."""

from __future__ import annotations

import os

import pytest

from fuzz.__main__ import main as fuzz
from fuzz.health import holdings, leak

INPUTS = os.environ.get("FUZZ_INPUTS", "6000")


@pytest.mark.timeout(3600)
def test_victims_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz(["--inputs", INPUTS]) == 0, capsys.readouterr().out
    report = capsys.readouterr().out
    assert f"{INPUTS} inputs: passed" in report
    for attack in ("door", "control", "receiver"):
        assert attack in report


def test_a_leak_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuzz.health.SETTLE_DEADLINE_S", 0.1)
    before = holdings(os.getpid())
    pipes = [os.pipe() for _ in range(10)]
    try:
        found = leak(os.getpid(), before)
    finally:
        for ends in pipes:
            for end in ends:
                os.close(end)
    assert found is not None
    assert "20 descriptors more" in found
