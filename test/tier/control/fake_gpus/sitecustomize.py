"""Python starts with this, where the folder is on its path: the GPUs are those of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.fake_cuda import FakeDriver

FakeDriver(
    devices=int(os.environ["FAKE_GPUS"]),
    memory_bytes=64 << 20,
    folder=Path(os.environ["FAKE_GPU_MEMORY"]),
).install(pytest.MonkeyPatch())
