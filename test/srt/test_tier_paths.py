"""Which path a load or a store takes: a short forward waits for its load, nothing for a store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.swiftcache import paths
from swiftcache_kernel import COPY_ENGINE, KERNEL, TWO_H200S, Path

LAYER_BYTES = 64 << 10
FASTEST, SPARING = Path("kernel", 64), Path("kernel", 8)
MANY = paths.COPY_ENGINE_MIN_LAYER_BYTES // LAYER_BYTES


@pytest.fixture
def chooser(monkeypatch: pytest.MonkeyPatch) -> paths.PathChooser:
    """For a pool on a GPU; what it would make is the path itself."""
    buffers = SimpleNamespace(
        device=torch.device("cuda"),
        layout=SimpleNamespace(layer_bytes=LAYER_BYTES, block_bytes=36 * LAYER_BYTES),
    )
    tier = SimpleNamespace(
        addresses=lambda blocks: blocks * 36 * LAYER_BYTES,
        donor_of=np.zeros_like,
        in_gpu_memory=lambda blocks: True,
    )
    monkeypatch.setattr(paths, "_measure", lambda *_: TWO_H200S)
    monkeypatch.setattr(paths, "layer_transfer", lambda *_, path, **__: path)
    monkeypatch.setattr(paths.PathChooser, "_upload", lambda _, addresses: addresses)
    made: Any = paths.PathChooser
    return made("auto", buffers, tier)


def batch(blocks: int) -> tuple[np.ndarray, torch.Tensor]:
    return np.arange(blocks), torch.arange(blocks)


@pytest.mark.parametrize(
    ("new_tokens", "rest"),
    [
        (1, FASTEST),
        (paths.FORWARD_TO_SPARE_TOKENS - 1, FASTEST),
        (paths.FORWARD_TO_SPARE_TOKENS, SPARING),
        (8192, SPARING),
    ],
)
def test_a_load_spares_the_sms_only_beside_a_forward_that_hides_it(
    chooser: paths.PathChooser, new_tokens: int, rest: Path
) -> None:
    first, others = chooser.load(*batch(1024), new_tokens)
    assert first.programs >= 32  # type: ignore[attr-defined]
    assert others == (first if rest is FASTEST else rest)


def test_large_loads_take_the_copy_engine_and_large_stores_do_not(
    chooser: paths.PathChooser,
) -> None:
    assert chooser.load(*batch(MANY), 8192)[1] == COPY_ENGINE
    assert chooser.store(*batch(MANY)) == SPARING


@pytest.mark.parametrize(("flag", "path"), [("copy", COPY_ENGINE), ("kernel", KERNEL)])
def test_the_flag_decides_for_all(chooser: paths.PathChooser, flag: str, path: Path) -> None:
    chooser._io_backend = flag
    assert chooser.load(*batch(64), 1) == (path, path)
    assert chooser.store(*batch(64)) == path
