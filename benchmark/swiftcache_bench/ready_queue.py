"""Conversations whose next turn may be sent, handed out by policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, Literal, TypeVar

import numpy as np

T = TypeVar("T")

ReadyQueuePolicy = Literal["random", "fifo"]


class ReadyQueue(Generic[T]):
    """Members are ready, held at the round barrier, or out with whoever took them. One event loop.

    ``policy``: ``random`` (by ``rng``) or ``fifo``. Whoever takes a member gives it back by `put`
    or `hold`, or says by `leave` that it is through.
    """

    def __init__(
        self, ready: Iterable[T], policy: ReadyQueuePolicy, rng: np.random.Generator
    ) -> None:
        self._ready = list(ready)
        self._held: list[T] = []
        self._out = 0
        self._policy = policy
        self._rng = rng
        self._changed = asyncio.Event()

    async def take(self) -> T | None:
        """The next member, as soon as there is one; None once all have left."""
        while not self._ready:
            if not self._out:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._out += 1
        last = len(self._ready)
        return self._ready.pop(int(self._rng.integers(last)) if self._policy == "random" else 0)

    def put(self, member: T) -> None:
        """``member`` is ready again."""
        self._ready.append(member)
        self._came_back()

    def hold(self, member: T) -> None:
        """``member`` is ready once nobody is out any more and none of its round is ready."""
        self._held.append(member)
        self._came_back()

    def leave(self) -> None:
        """A member that was taken does not come back."""
        self._came_back()

    def _came_back(self) -> None:
        self._out -= 1
        if not self._out and not self._ready:
            self._ready, self._held = self._held, []
        self._changed.set()
