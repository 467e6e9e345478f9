#!/usr/bin/env python3
"""Make a virtual environment with SwiftCache, SGLang and the tools, and show how far it is.

``install.py VENV`` uses pip alone and takes wheels only, so no compiler is needed. pip's whole
output goes to ``VENV/install.log``; the terminal shows one line that moves (a pipe: one line every
ten seconds), and pip's errors if it fails.
"""

from __future__ import annotations

import contextlib
import queue
import re
import subprocess
import sys
import threading
import time
import venv
from collections import deque
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parent.parent
PIP_WITH_RAW_PROGRESS = "pip>=25"
QUIET_INTERVAL_S = 10.0
LIVE_INTERVAL_S = 0.2
ERROR_LINES = 15

NAMED = re.compile(r"(?:Collecting|Obtaining|Processing|Requirement already satisfied:) (\S+)")
DOWNLOADING = re.compile(r"\s*Downloading (\S+)")
RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class Progress:
    """What pip does now, told from its output, as one line on the terminal."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown_at = self._started
        self._live = sys.stdout.isatty()
        self._file = ""
        self._doing = "starting pip"

    def read(self, line: str) -> None:
        """Take one line of pip's output into account."""
        if match := NAMED.match(line):
            self._doing = f"finding {_project(match[1])}"
        elif match := DOWNLOADING.match(line):
            self._file = _project(match[1])
        elif match := RAW_PROGRESS.match(line):
            done, size = int(match[1]) / 1e6, int(match[2]) / 1e6
            self._doing = f"downloading {self._file}, {done:.0f} of {size:.0f} MB"
        elif line.startswith("Installing collected packages"):
            self._doing = f"unpacking {line.count(',') + 1} packages"

    def show(self) -> None:
        now = time.monotonic()
        if now - self._shown_at < (LIVE_INTERVAL_S if self._live else QUIET_INTERVAL_S):
            return
        self._shown_at = now
        text = f"  {now - self._started:4.0f} s  {self._doing}"
        print(f"\r\x1b[K{text[:79]}" if self._live else text, end="" if self._live else "\n")
        sys.stdout.flush()

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", flush=True)


def _project(word: str) -> str:
    """The project that a requirement ("torch==2.11.0") or a wheel's path or address names."""
    return re.split(r"[=<>!~\[;]|-\d", word.rpartition("/")[2])[0]


def pip(python: Path, log_path: Path, *arguments: str) -> None:
    """Run ``pip install`` to its end; SystemExit, after its last errors, if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    progress = Progress()
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    tail: deque[str] = deque(maxlen=ERROR_LINES)
    with (
        log_path.open("a") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
        while True:
            # pip is silent for a minute or two while it unpacks: the clock must go on.
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=LIVE_INTERVAL_S)
                if line is None:
                    break
                log.write(line)
                progress.read(line)
                if not line.startswith(("WARNING:", "Progress", "Requirement already")):
                    tail.append(line)
            progress.show()
    progress.end()
    if process.returncode != 0:
        errors = [line for line in tail if "error" in line.lower()] or list(tail)
        print("".join(errors), end="", file=sys.stderr)
        sys.exit(f"install: pip failed; its whole output is in {log_path}")


def _forward(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: install.py VENV")
    folder = Path(sys.argv[1]).absolute()
    started = time.monotonic()
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Making {folder} with Python {sys.version.split()[0]}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
    log_path = folder / "install.log"
    log_path.write_text("")
    pip(python, log_path, "--quiet", "--upgrade", PIP_WITH_RAW_PROGRESS)
    print("Installing SGLang, SwiftCache and the tools: about 10 GB, 3 to 5 minutes", flush=True)
    wheels_only = ("--only-binary", ":all:", "--progress-bar", "raw")
    pip(python, log_path, *wheels_only, "--editable", f"{REPOSITORY}[dev]")
    print(f"Installed in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
