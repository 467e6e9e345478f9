"""`make demo`, as a newcomer runs it: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import psutil
import pytest

from demo.asking import Answer
from demo.report import judge
from support.processes import end_tree, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder with a name so short that the path of a socket below it stays under 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(900)
def test_demo_restores_from_donors_and_answers_as_without(tmp_path: Path, scratch: Path) -> None:
    with _Demo(tmp_path / "demo.log", scratch) as demo:
        code = demo.process.wait(timeout=900)
        assert demo.left_behind() == []
    assert code == 0, demo.output()
    assert "output identical: yes (12 of 12 turns)" in demo.output()
    restored = re.search(r"restored from donors: ([\d,]+) tokens", demo.output())
    assert restored
    assert int(restored[1].replace(",", "")) > 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process_and_no_file(
    tmp_path: Path, scratch: Path, signum: int
) -> None:
    with _Demo(tmp_path / "demo.log", scratch) as demo:
        wait_until(
            lambda: "loading the model" in demo.output() or demo.process.poll() is not None,
            deadline_s=180,
            what="the demo starts its server",
        )
        demo.process.send_signal(signum)
        assert demo.process.wait(timeout=60) == 128 + signum, demo.output()
        assert demo.left_behind() == []
    assert not list(scratch.iterdir())


def test_the_verdict_is_bad_when_one_token_differs() -> None:
    verdict = judge([_answer(ids=(1, 2)), _answer(ids=(3, 4))], [_answer(ids=(1, 2)), _answer()])
    assert verdict.identical_turns == 1
    assert not verdict.good


def test_the_verdict_is_bad_when_nothing_was_restored() -> None:
    assert not judge([_answer(donor_tokens=0)], [_answer()]).good
    assert judge([_answer(donor_tokens=16)], [_answer()]).good


def _answer(ids: Sequence[int] = (), donor_tokens: int = 16) -> Answer:
    return Answer("", tuple(ids), 32, 0, donor_tokens, 0.1)


class _Demo:
    """The demo as a process, with a log and a mark that everything it starts inherits."""

    def __init__(self, log_path: Path, scratch: Path) -> None:
        self._log = log_path
        self._mark = uuid.uuid4().hex
        ours = {
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("scripts", "test")),
            "TMPDIR": str(scratch),
            "DEMO_TEST_MARK": self._mark,
        }
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "demo"],
                env={**os.environ, **ours},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        end_tree(self.process)
        for process in self.left_behind():
            process.kill()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def left_behind(self) -> list[psutil.Process]:
        """Processes that carry the mark, zombies of this test excepted."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DEMO_TEST_MARK") == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found
