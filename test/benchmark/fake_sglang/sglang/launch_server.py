"""`python -m sglang.launch_server` is the fake server."""

from __future__ import annotations

import runpy
from pathlib import Path

FAKE_SERVER = Path(__file__).resolve().parents[2] / "fake_server.py"

if __name__ == "__main__":
    runpy.run_path(str(FAKE_SERVER), run_name="__main__")
