"""What comes after the forwards in flight, on streams that are as late as they may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang.srt.swiftcache import forward_fence
from sglang.srt.swiftcache.forward_fence import ForwardFence
from support.slow_streams import SlowStreams


class Gpu:
    """A forward, then work behind a fence, then what the scheduler does next: all queued."""

    def __init__(self) -> None:
        self.streams = SlowStreams()
        self.done: list[str] = []

    def queue(self) -> Callable[[], bool]:
        with self.streams.stream(self.streams.forward):
            self._queue("forward")
        fence = ForwardFence(self.streams.forward, "cuda:0")
        is_done = fence.queue(lambda: self._queue("work"))
        self._queue("next")
        return is_done

    def _queue(self, what: str) -> None:
        self.streams.current.queue(lambda: self.done.append(what))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(forward_fence.torch, "cuda", gpu.streams)
    return gpu


def test_work_comes_after_the_forwards_and_before_what_the_scheduler_does_next(gpu: Gpu) -> None:
    gpu.queue()
    assert gpu.done == []
    gpu.streams.schedule.synchronize()
    assert gpu.done == ["forward", "work", "next"]


def test_work_is_done_when_the_gpu_has_done_it(gpu: Gpu) -> None:
    is_done = gpu.queue()
    assert not is_done()
    gpu.streams.forward.do_up_to(1)
    assert gpu.done == ["forward"]
    assert not is_done()
    gpu.streams.forward.synchronize()
    assert gpu.done == ["forward", "work"]
    assert is_done()


def test_on_the_cpu_a_forward_and_the_work_are_done_when_they_return() -> None:
    done: list[str] = []
    is_done = ForwardFence(None, "cpu").queue(lambda: done.append("work"))
    assert done == ["work"]
    assert is_done()
