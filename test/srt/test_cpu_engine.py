"""The CPU engine's helper: only where it is asked for and no CUDA driver loads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang.srt.swiftcache import cpu_engine

REPORT = (
    "import os, sys, sglang;"
    "print('ENGINE', os.environ.get('SGLANG_USE_CPU_ENGINE'), os.environ.get('TRITON_INTERPRET'),"
    " 'common_ops' in sys.modules)"
)


def imported_with(*arguments: str) -> str:
    """What ``import sglang`` does to a process started with these arguments."""
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return next(x for x in done.stdout.splitlines() if x.startswith("ENGINE"))


@pytest.mark.parametrize("arguments", [("--device", "cpu"), ("--device=cpu",)])
@pytest.mark.skipif(cpu_engine.driver_loads(), reason="a CUDA driver loads here")
def test_asked_for_and_no_driver(arguments: tuple[str, ...]) -> None:
    assert imported_with(*arguments) == "ENGINE 1 1 True"


@pytest.mark.parametrize("arguments", [(), ("--device", "cuda"), ("cpu", "--device")])
def test_not_asked_for(arguments: tuple[str, ...]) -> None:
    assert imported_with(*arguments) == "ENGINE None None False"


def test_a_driver_that_loads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engine, "driver_loads", lambda: True)
    for name in (cpu_engine.CPU_ENGINE_ENV, cpu_engine.TRITON_INTERPRET_ENV):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ), set(sys.modules)
    cpu_engine.enable()
    assert (dict(os.environ), set(sys.modules)) == before
