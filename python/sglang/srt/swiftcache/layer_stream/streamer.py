"""``LayerStreamer``: while one layer computes, the next one's window pages arrive.

The window holds one layer at a time in each of its two sets. A forward with a plan goes

    gather 0 | layer 0        | layer 1                 | layer 2                 | tail
             | gather 1       | scatter 0, gather 2     | scatter 1, gather 3     | scatter L-1

`enter(l)` is called at the first touch of layer l, by whatever touches it: only then has the
attention of l-1 been queued, and nothing of l has been written yet. Waiting at the first read
alone would be too late: most attention backends write the new tokens first, and the gather would
overwrite them.

Outside a forward, and in a forward without a plan, `enter` returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sglang.srt.swiftcache.layer_stream.movers import PageMover

NO_IDS = np.empty(0, dtype=np.int64)


class ForwardPlan(NamedTuple):
    """The window pages of a batch and where their content lives; int64 arrays."""

    pages: np.ndarray
    """Distinct pages that hold tokens which exist already: they are gathered."""
    addresses: np.ndarray
    """Of their home blocks."""
    new_pages: np.ndarray
    """Distinct pages that get tokens in this forward: they are scattered."""
    new_addresses: np.ndarray
    blocks: np.ndarray
    """Ids of all these blocks: not to be given away before the forward is done."""


class LayerStreamer:
    """One per pool. Scheduler thread only."""

    def __init__(self, mover: PageMover, layers: int) -> None:
        self._mover = mover
        self._layers = layers
        self._plan: ForwardPlan | None = None
        self._capturing = False
        self._layer: int | None = None  # the last that was entered; None outside a forward
        self._in_flight: list[tuple[Callable[[], bool], np.ndarray]] = []
        self.gathered_bytes = 0
        self.scattered_bytes = 0

    @property
    def has_plan(self) -> bool:
        """Whether the forward that is being prepared streams."""
        return self._plan is not None

    # -- around a forward ---------------------------------------------------------------------

    @contextmanager
    def planned(self, plan: ForwardPlan | None) -> Iterator[None]:
        """Inside, forwards follow ``plan``; None if no window page is concerned."""
        self._plan = plan
        try:
            yield
        finally:
            self._plan = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, forwards are captured with the copies in them: replays follow their plans."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around everything that a forward queues, on its stream."""
        plan = self._plan
        if plan is None:
            yield
            return
        self._mover.load(plan)
        try:
            yield
        finally:
            self._forget_done()
            self._in_flight.append((self._mover.mark_done(), plan.blocks))
            layers = self._layers * self._mover.layer_bytes
            self.gathered_bytes += len(plan.pages) * layers
            self.scattered_bytes += len(plan.new_pages) * layers

    def wrap_model(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A model's forward, all of whose layers are streamed if there is a plan.

        The copies are queued inside, so that they become part of a graph that is captured.
        """

        @functools.wraps(forward)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            if self._plan is None and not self._capturing:
                return forward(*args, **kwargs)
            self._begin()
            try:
                output = forward(*args, **kwargs)
                self._end()
            finally:
                self._layer = None
            return output

        return streamed

    def enter(self, layer: int) -> None:
        """First touch of a layer; further calls for the same layer, or an earlier one, do nothing.

        Raises RuntimeError if a layer was left out: its tokens would never reach their blocks.
        """
        if self._layer is None or layer <= self._layer:
            return
        if layer != self._layer + 1:
            raise RuntimeError(f"layer {layer} was touched after {self._layer}: one was left out")
        mover = self._mover
        mover.await_gather(layer)
        mover.follow()
        if layer > 0:
            mover.scatter(layer - 1)
        if layer + 1 < self._layers:
            mover.gather(layer + 1)
        self._layer = layer

    def _begin(self) -> None:
        self._layer = -1
        self._mover.follow()
        self._mover.gather(0)

    def _end(self) -> None:
        if self._layer != self._layers - 1:
            raise RuntimeError(
                f"the forward ended after layer {self._layer}, expected {self._layers - 1}: the "
                "model does not use every attention layer"
            )
        self._mover.follow()
        self._mover.scatter(self._layers - 1)
        self._mover.join()

    # -- blocks that a forward may still read or write -------------------------------------------

    def in_flight(self, blocks: np.ndarray) -> np.ndarray:
        """Which of these blocks a forward that was launched may still use: bool [n]."""
        self._forget_done()
        if not self._in_flight:
            return np.zeros(len(blocks), dtype=bool)
        return np.isin(blocks, np.concatenate([held for _, held in self._in_flight]))

    def _forget_done(self) -> None:
        self._in_flight = [(done, held) for done, held in self._in_flight if not done()]

    def wait(self) -> None:
        """Until every forward that was launched is done with its blocks."""
        self._mover.wait_done()
        self._in_flight.clear()

    def order_after_forward(self, stream: Any) -> None:
        """What is queued on ``stream`` from now on sees what the launched forwards have written."""
        self._mover.order_after_forward(stream)
