"""NVML for two GPUs with 18 NVLinks between them."""

from __future__ import annotations

from typing import Any

from support.fake_nvml import FakeGpu, FakeNvml

_LINKS = 18
_machine = FakeNvml(
    FakeGpu(0, link_ends=[1] * _LINKS),
    FakeGpu(1, link_ends=[0] * _LINKS),
    p2p=frozenset({"READ", "WRITE", "NVLINK"}),
)


def nvmlInit() -> None:  # noqa: N802 - the library's name
    pass


def __getattr__(name: str) -> Any:
    return getattr(_machine, name)
