"""A CUDA driver made of Python objects, so that these tests need no GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from support.fake_cuda import FakeDriver
from support.processes import wait_until
from swiftcache_tier.extents import cuda


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver that the code under test calls; NVML is not there."""
    fake = FakeDriver()
    fake.install(monkeypatch)
    monkeypatch.setattr(cuda, "load_nvml", lambda: None)
    yield fake
    # A thread that outlived this would call the machine's own driver, with what is none of its.
    wait_until(lambda: not idle_context_threads(), 30, "contexts to be given back", 0.01)


def idle_context_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "idle-context"]
