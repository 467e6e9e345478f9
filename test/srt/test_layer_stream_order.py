"""The order that streams and events give to a forward's copies, without a GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.swiftcache.layer_stream import movers
from sglang.srt.swiftcache.layer_stream.streamer import ForwardPlan, LayerStreamer
from support.simulated_gpu import Gpu, Stream
from swiftcache_kernel import counted_transfer

LAYERS = 5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(movers.torch, "cuda", gpu.as_torch_cuda)

    class Transfer:
        def __init__(self, buffers: Any, capacity: int, *, gather: bool) -> None:
            self._name = "gather" if gather else "scatter"
            self._loads = itertools.count()

        def load(self, table: Any, pages: Any) -> None:
            gpu.queue(f"load {self._name}s {next(self._loads)}")

        def move(self, layer: int) -> None:
            gpu.queue(f"{self._name} {layer}")

    monkeypatch.setattr(counted_transfer, "CountedTransfer", Transfer)
    return gpu


def streamer() -> LayerStreamer:
    layout = SimpleNamespace(layers=LAYERS, layer_bytes=1)
    buffers: Any = SimpleNamespace(layout=layout, device=torch.device("cuda", 0))
    return LayerStreamer(movers.CudaMover(buffers, 8), LAYERS)


def forward(gpu: Gpu, streaming: LayerStreamer, leaves: bool = True) -> None:
    """Each layer writes its new tokens, then reads; the head follows."""
    none = np.empty(0, dtype=np.int64)

    def model() -> None:
        for layer in range(LAYERS):
            streaming.leave(layer)  # of an attention that found nothing to do
            streaming.enter(layer)
            gpu.queue(f"set {layer}")
            streaming.enter(layer)
            gpu.queue(f"attend {layer}")
            if leaves:
                streaming.leave(layer)
                streaming.leave(layer)
            gpu.queue(f"mlp {layer}")

    with streaming.planned(ForwardPlan(none, none, none, none, none)), streaming.forward():
        streaming.wrap_model(model)()
        gpu.queue("head")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "enters alone"])
def test_every_layer_finds_its_pages_and_loses_none(gpu: Gpu, leaves: bool) -> None:
    forward(gpu, streamer(), leaves)
    for layer in range(LAYERS):
        assert gpu.ordered(f"gather {layer}", f"set {layer}"), "it would overwrite new tokens"
        assert gpu.ordered(f"set {layer}", f"scatter {layer}")
        assert gpu.ordered(f"scatter {layer}", "head"), "the next forward might come before it"
        assert gpu.ordered("load gathers 0", f"gather {layer}")
        assert gpu.ordered("load scatters 0", f"scatter {layer}")
    for layer in range(LAYERS - 2):
        # both layers are in the same set of the window
        assert gpu.ordered(f"attend {layer}", f"gather {layer + 2}")
        assert gpu.ordered(f"scatter {layer}", f"gather {layer + 2}")


def test_the_next_layer_arrives_while_one_computes(gpu: Gpu) -> None:
    forward(gpu, streamer())
    for layer in range(1, LAYERS):
        for mine in (f"set {layer - 1}", f"attend {layer - 1}"):
            assert not gpu.ordered(mine, f"gather {layer}")
            assert not gpu.ordered(f"gather {layer}", mine)


def test_copies_wait_for_no_more_than_they_must(gpu: Gpu) -> None:
    forward(gpu, streamer())
    for layer in range(LAYERS - 2):
        assert not gpu.ordered(f"mlp {layer}", f"gather {layer + 2}")
        # Else attention takes the SMs first that waited for the same gather.
        assert not gpu.ordered(f"gather {layer + 1}", f"scatter {layer}")
        assert not gpu.ordered(f"set {layer + 1}", f"gather {layer + 2}")


@pytest.mark.parametrize("again", [0, 1], ids=["an earlier layer", "this layer"])
def test_a_layer_that_comes_again_after_its_attention_is_an_error(gpu: Gpu, again: int) -> None:
    """Models that loop may: the set of the layer holds another one's pages then, or is about to."""
    streaming = streamer()

    def model() -> None:
        for layer in (0, 1, again):
            streaming.enter(layer)
            streaming.leave(layer)

    words = f"layer {again} was touched after its attention: the model uses it more than once"
    with streaming.capturing(), pytest.raises(RuntimeError, match=words):
        streaming.wrap_model(model)()


def test_a_forward_without_a_plan_queues_nothing(gpu: Gpu) -> None:
    streaming = streamer()

    def model() -> None:
        for layer in range(LAYERS):
            streaming.enter(layer)
            streaming.leave(layer)

    with streaming.planned(None), streaming.forward():
        streaming.wrap_model(model)()
    assert gpu.before == {}


def test_a_capture_holds_the_copies_though_there_is_no_plan(gpu: Gpu) -> None:
    streaming = streamer()

    def model() -> None:
        for layer in range(LAYERS):
            streaming.enter(layer)
            gpu.queue(f"attend {layer}")

    with streaming.capturing():
        streaming.wrap_model(model)()
    assert {f"gather {n}" for n in range(LAYERS)} <= set(gpu.before)
    assert {f"scatter {n}" for n in range(LAYERS)} <= gpu.main.done, "the capture is not joined"


def test_a_stream_can_wait_for_what_was_launched(gpu: Gpu) -> None:
    streaming = streamer()
    other = Stream()
    streaming.order_after_forward(other)
    assert other.done == set()
    forward(gpu, streaming)
    streaming.order_after_forward(other)
    assert {f"scatter {n}" for n in range(LAYERS)} <= other.done


def test_the_attention_of_a_layer_leaves_it(gpu: Gpu) -> None:
    """However its forward is called, and for layers whose numbers begin elsewhere."""
    streaming = streamer()

    def attend(q: Any, k: Any, v: Any, layer: Any, batch: Any = None, **_: Any) -> Any:
        gpu.queue(f"attend {layer.layer_id - 3}")
        return q + k + v

    forward = streaming.wrap_attention(attend, 3)

    def model() -> None:
        for number in range(LAYERS):
            streaming.enter(number)
            layer = SimpleNamespace(layer_id=number + 3)
            if number % 2:
                assert forward(1, 2, 3, layer, "batch") == 6
            else:
                assert forward(q=1, k=2, v=3, layer=layer, sinks=None) == 6
            gpu.queue(f"mlp {number}")

    with streaming.capturing():
        streaming.wrap_model(model)()
    for layer in range(LAYERS - 2):
        assert gpu.ordered(f"attend {layer}", f"gather {layer + 2}")
        assert not gpu.ordered(f"mlp {layer}", f"gather {layer + 2}")
