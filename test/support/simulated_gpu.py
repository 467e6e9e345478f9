"""Streams and events without a GPU, which tell what is ordered and what is left to chance.

Streams are lists here, and what must come before what follows from them and from the events, as on
a GPU: two operations that nothing orders may run in any order, or at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch


class Gpu:
    """Operations by name, each with those that surely come before it."""

    def __init__(self) -> None:
        self.before: dict[str, set[str]] = {}
        self.main = Stream()
        self.current = self.main
        self.as_torch_cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda device, priority=0: Stream(),
            current_stream=lambda device: self.current,
            stream=self.on,
        )
        """In place of `torch.cuda`."""

    def queue(self, name: str) -> None:
        assert name not in self.before, f"{name} was queued twice"
        self.before[name] = set(self.current.done)
        self.current.done.add(name)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def ordered(self, first: str, second: str) -> bool:
        return first in self.before[second]


class Stream:
    def __init__(self) -> None:
        self.done: set[str] = set()
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: Event) -> None:
        self.done |= event.done


class Event:
    def __init__(self) -> None:
        self.done: set[str] = set()

    def record(self, stream: Stream) -> None:
        self.done = set(stream.done)

    def query(self) -> bool:
        return True
