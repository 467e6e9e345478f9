"""Which path a load or a store takes: a short forward waits for its load, nothing for a store."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.swiftcache import page_major_paths, paths
from swiftcache_kernel import COPY_ENGINE, KERNEL, TWO_H200S, Path
from swiftcache_kernel.copy_engine import CopyRefused

LAYER_BYTES = 64 << 10
FASTEST, SPARING = Path("kernel", 64), Path("kernel", 8)
MANY = 4096


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


def stored(chooser: paths.PathChooser, pages: np.ndarray) -> Path:
    path: Any = chooser.store(np.arange(len(pages)), torch.from_numpy(pages), pages)
    assert isinstance(path, Path)
    return path


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


def test_engines_that_refused_are_not_asked_again(chooser: paths.PathChooser) -> None:
    pages = np.arange(MANY)
    assert stored(chooser, pages) is COPY_ENGINE
    chooser.give_up_copies(CopyRefused("cudaMemcpy2DAsync failed with cudaErrorInvalidValue"))
    assert stored(chooser, pages) == SPARING


def test_a_load_asks_the_gpu_for_nothing(chooser: paths.PathChooser) -> None:
    """Its pages were taken behind a forward that may be running."""

    class OnTheGpu:
        def cpu(self) -> None:
            raise AssertionError("the load waits for the forward in flight")

    pages: Any = OnTheGpu()
    assert COPY_ENGINE not in chooser.load(np.arange(MANY), pages, 8192)


@pytest.mark.parametrize(
    ("run", "path"),
    [(1, SPARING), (paths.STORED_RUN_BLOCKS_MIN, COPY_ENGINE), (MANY, COPY_ENGINE)],
)
def test_stores_leave_the_sms_alone_where_that_is_few_calls(
    chooser: paths.PathChooser, run: int, path: Path
) -> None:
    pages = np.arange(MANY) + np.arange(MANY) // run
    assert stored(chooser, pages) == path


def test_without_a_copy_engine_the_kernels_store(chooser: paths.PathChooser) -> None:
    chooser._table = replace(TWO_H200S, copies=None)
    assert stored(chooser, np.arange(MANY)) == SPARING


@pytest.mark.parametrize(("flag", "path"), [("copy", COPY_ENGINE), ("kernel", KERNEL)])
def test_the_flag_decides_for_all(chooser: paths.PathChooser, flag: str, path: Path) -> None:
    chooser._io_backend = flag
    assert chooser.load(*batch(64), 1) == (path, path)
    assert stored(chooser, np.arange(64)) == path


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 28, 36, 64, 80, 126])
def test_launches_of_a_load_move_each_layer_once_and_the_ends_alone(layers: int) -> None:
    launches = paths.load_launches(layers)
    moved = [first + n for first, count in launches.items() for n in range(count)]
    assert moved == list(range(layers))
    assert max(launches.values()) <= paths.LAYERS_PER_LAUNCH
    assert launches[0] == launches[layers - 1] == 1
    if layers >= 28:
        assert list(launches.values())[:3] == [1, 1, 2]
        assert len(launches) <= layers / 4 + 6


def test_no_load_or_store_of_pages_compiles_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the scheduler's step: all sizes are compiled when the pool is made."""
    compiled: list[int] = []
    monkeypatch.setattr(
        page_major_paths, "compile_copies", lambda _, layers: compiled.extend(layers)
    )
    layout = SimpleNamespace(layers=36)
    buffers: Any = SimpleNamespace(device=torch.device("cuda"), layout=layout)
    tier: Any = None
    page_major_paths.PageMajorPaths(buffers, tier)
    assert set(compiled) == {*paths.load_launches(36).values(), 36}
