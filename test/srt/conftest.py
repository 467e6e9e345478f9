"""Tests of the SGLang side inside this process: SGLang is imported for its CPU engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    # Only while SGLang is imported: a server started by another test must find out by itself.
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


with _environment(CPU_ENGINE):
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
