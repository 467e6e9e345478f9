"""Makes the scripts' package importable, and what tests of several files share."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmark"
sys.path.insert(0, str(BENCHMARK))

VOCAB = 1000


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder without a tokenizer: what dummy weights are served from."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    return folder
