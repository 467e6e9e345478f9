"""Fixtures that tests of several folders share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.tiny_model import build_tiny_model

# A test must not depend on what a user's shell exports, nor reach for a hub.
for name in [name for name in os.environ if name.startswith(("SWIFTCACHE_", "SGLANG_"))]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a 4-layer Qwen3 with random weights, float32, and a chat template."""
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny-qwen3")
