"""What the copy engine refuses, where no GPU is needed to see it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from swiftcache_kernel.copy_engine import CopyEngine, CopyRefused, Rows

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="copies would run here, see test_layer_transfer_gpu"
)

ROWS = Rows(1 << 40, 64, 1 << 41, 256, 64, 3)


def engine(
    monkeypatch: pytest.MonkeyPatch, *, stream: int = 5, capturing: bool = False
) -> CopyEngine:
    """One on a GPU that PyTorch believes in and the CUDA runtime does not find."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return CopyEngine(torch.device("cuda:0"))


def test_a_copy_that_the_runtime_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = engine(monkeypatch)
    with pytest.raises(CopyRefused, match=r"^cudaMemcpy2DAsync failed with cudaError") as error:
        copies.copy_rows([ROWS])
    assert "\n" not in str(error.value)
    with pytest.raises(CopyRefused, match=r"^cudaMemcpyBatchAsync failed with cudaError") as error:
        copies.copy_all([1 << 40, 1 << 41], [1 << 42, 1 << 43], [64, 32])
    assert "\n" not in str(error.value)


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = engine(monkeypatch, capturing=True)
    with pytest.raises(RuntimeError, match="no use in a CUDA graph"):
        copies.copy_rows([ROWS])
    with pytest.raises(RuntimeError, match="no use in a CUDA graph"):
        copies.copy_all([1], [2], [3])


def test_a_batch_on_the_default_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="default stream"):
        engine(monkeypatch, stream=0).copy_all([1], [2], [3])
