"""A receiver that behaves, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BLOCK_BYTES = 1 << 15
END_DEADLINE_S = 30.0
_PROGRAM = Path(__file__).parents[2] / "test/support/receiver_process.py"


class Bystander:
    """``support.receiver_process``: call it with the name of a command and its arguments."""

    def __init__(self, runtime_dir: Path, name: str, *specs: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), str(runtime_dir), str(BLOCK_BYTES), name, *specs],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        answer = self._answer()
        assert answer == "ready", answer
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=END_DEADLINE_S)

    def __call__(self, command: str, *arguments: Any) -> Any:
        """Raises EOFError when the process has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([command, *arguments]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError("the receiver has ended") from None
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("the receiver has ended")
        return json.loads(line)
