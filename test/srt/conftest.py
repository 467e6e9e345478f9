"""Tests of the SGLang side inside this process: SGLang is imported for its CPU engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cpu_sglang import cpu_engine_environment

with cpu_engine_environment():
    import sglang.srt.mem_cache.hiradix_cache
    import sglang.srt.server_args  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The radix cache asks torch.distributed for the size of its group."""
    import torch.distributed as dist

    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """Reading ``--device cpu`` sets variables for child processes: not beyond one test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
