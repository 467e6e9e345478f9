"""Streams of a GPU that is as late as it may be, for the transfers of a tree on the CPU.

What is queued on a stream is done when a test lets the stream go on, or when somebody waits for it,
and in the order of the stream. Bytes are moved then and no sooner, so what reads them early, or
gives away early what is still to be read, is seen by its content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from sglang.srt.managers import cache_controller

from sglang.srt.swiftcache import loads, stores


class SlowStreams:
    """Takes the place of the device module (`torch.cuda`), and of the paths of a pool."""

    def __init__(self) -> None:
        self.__name__ = "slow streams"
        self._all: list[_Stream] = []
        self.schedule = self.Stream()
        """The scheduler's. What it computes on the host is there at once, its events are not."""
        self.forward = self.Stream()
        self.current = self.schedule

    def Stream(self) -> _Stream:  # noqa: N802  as in torch
        self._all.append(_Stream())
        return self._all[-1]

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self)

    def current_stream(self) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For what builds a controller or records an event."""
        with ExitStack() as patches:
            for module in (cache_controller, loads, stores):
                patches.enter_context(mock.patch.object(module, "device_module", self))
            yield

    def slow_down(self, pool: Any) -> None:
        """Have the loads and stores of a `DonorKVCache` done on their streams."""
        pool._paths = _SlowPaths(self, pool._paths)
        pool._wait_for_transfers = self.synchronize

    def launch(self, work: Callable[[], None], loads: _Event | None) -> _Event:
        """Queue a forward behind what the scheduler has queued and behind its loads."""
        queued = self.Event()
        queued.record()
        for event in (queued, loads):
            if event is not None:
                event.wait(self.forward)
        self.forward.queue(work)
        done = self.Event()
        done.record(self.forward)
        return done

    def go_on(self, which: int, steps: int) -> None:
        """Let one of the streams do so much of what is queued on it."""
        stream = self._all[which % len(self._all)]
        stream.do_up_to(min(stream.done + steps, stream.end))

    def synchronize(self) -> None:
        for stream in self._all:
            stream.synchronize()


class SlowLife:
    """Of a state machine, before its other base: all that it builds is on slow streams, whose work
    is done when a rule says so or when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = SlowStreams()
        self.patches = ExitStack()
        self.patches.enter_context(self.streams.in_place())

    @rule(stream=st.integers(0, 3), steps=st.integers(1, 8))
    def go_on(self, stream: int, steps: int) -> None:
        self.streams.go_on(stream, steps)

    @rule()
    def all_goes_on(self) -> None:
        self.streams.synchronize()

    def teardown(self) -> None:
        try:
            super().teardown()  # type: ignore[misc]
        finally:
            self.patches.close()


class _Place(NamedTuple):
    """In a stream: all that had been queued on it by some time."""

    stream: _Stream
    end: int

    def reach(self) -> None:
        self.stream.do_up_to(self.end)


class _Stream:
    def __init__(self) -> None:
        self._queued: deque[Callable[[], None]] = deque()
        self.done = 0
        self.last_waited: _Place | None = None

    @property
    def end(self) -> int:
        return self.done + len(self._queued)

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)

    def do_up_to(self, end: int) -> None:
        while self.done < end:
            work = self._queued.popleft()
            self.done += 1
            work()

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def synchronize(self) -> None:
        self.do_up_to(self.end)


class _Event:
    def __init__(self, streams: SlowStreams) -> None:
        self._streams = streams
        self._place: _Place | None = None

    def record(self, stream: _Stream | None = None) -> None:
        stream = stream or self._streams.current
        stream.queue(lambda: None)  # it does not come by itself on an empty stream either
        self._place = _Place(stream, stream.end)

    def wait(self, stream: _Stream) -> None:
        stream.last_waited = self._place
        if self._place is not None:
            stream.queue(self._place.reach)

    def query(self) -> bool:
        return self._place is None or self._place.stream.done >= self._place.end

    def synchronize(self) -> None:
        if self._place is not None:
            self._place.reach()


class _SlowPaths:
    """As `PathChooser`, whose transfers it queues on the current stream."""

    def __init__(self, streams: SlowStreams, paths: Any) -> None:
        self._streams = streams
        self._paths = paths

    def load(self, blocks: np.ndarray, pages: torch.Tensor, new_tokens: int) -> tuple[Any, Any]:
        first, rest = self._paths.load(blocks, pages, new_tokens)
        return _SlowTransfer(self._streams, first), _SlowTransfer(self._streams, rest)

    def store(self, blocks: np.ndarray, pages: torch.Tensor, host_pages: np.ndarray) -> Any:
        behind = self._streams.current.last_waited
        assert behind is not None, "the store does not wait for what is to be stored"
        assert behind.stream.done >= behind.end, "the host does not know the pages yet"
        return _SlowTransfer(self._streams, self._paths.store(blocks, pages, host_pages))


class _SlowTransfer:
    def __init__(self, streams: SlowStreams, transfer: Any) -> None:
        self._streams = streams
        self._transfer = transfer
        self.blocks = transfer.blocks

    def gather_layers(self, first: int, layers: int) -> None:
        self._streams.current.queue(partial(self._transfer.gather_layers, first, layers))

    def scatter_all(self) -> None:
        self._streams.current.queue(self._transfer.scatter_all)
