"""``LayerStreamer``: while one layer computes, the next one's window pages arrive.

The window holds one layer at a time in each of its two sets. A forward with a plan goes

    gathers    gather 0, gather 1 | gather 2  | gather 3  |
    forward                       | layer 0   | layer 1   | layer 2   | tail
    scatters                      |           | scatter 0 | scatter 1 | scatter 2

Layer l waits for gather l. Once its attention is queued, nothing of it is touched any more: scatter
l brings its new tokens home, and gather l + 2 may overwrite its set behind that. Gathers and
scatters have a stream each: a gather follows the one before it at once, without a look at what the
forward does then. So it finds SMs before the attention does that waited for the same gather; the
other way round all of its programs crowd on the few SMs that the attention has left free, at 60 %
of the speed of the link.

`enter(l)` is called at the first touch of layer l, by whatever touches it, and `leave(l)` after its
attention. Waiting at the first read alone would be too late: most attention backends write the new
tokens first, and the gather would overwrite them.

Outside a forward, and in a forward without a plan, both return at once.
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
        self._left: int = -1  # the last whose attention is queued
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

    def wrap_attention(self, forward: Callable[..., Any], first_layer: int) -> Callable[..., Any]:
        """An attention backend's forward, which leaves the layer that it was called for."""

        @functools.wraps(forward)
        def leaving(q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(q, k, v, layer, *args, **kwargs)
            self.leave(layer.layer_id - first_layer)
            return output

        return leaving

    def enter(self, layer: int) -> None:
        """First touch of a layer; further calls for it, until it is left, do nothing.

        Raises RuntimeError if a layer was left out: its tokens would never reach their blocks. So
        for one that was left: its set may hold another layer by now.
        """
        if self._layer is None or self._left < layer == self._layer:
            return
        if layer <= self._left:
            raise RuntimeError(
                f"layer {layer} was touched after its attention: the model uses it more than once"
            )
        if layer != self._layer + 1:
            raise RuntimeError(f"layer {layer} was touched after {self._layer}: one was left out")
        self.leave(layer - 1)
        self._mover.await_gather(layer)
        self._layer = layer

    def leave(self, layer: int) -> None:
        """The attention of a layer is queued; does nothing if that was not entered, or was left.

        Left out it is made up for when the next layer is entered, with less overlap.
        """
        if self._layer is None or not self._left < layer <= self._layer:
            return
        self._left = layer
        self._mover.scatter(layer)
        if layer + 2 < self._layers:
            self._mover.gather(layer + 2)

    def _begin(self) -> None:
        self._layer = self._left = -1
        self._mover.begin()
        for layer in range(min(2, self._layers)):
            self._mover.gather(layer)

    def _end(self) -> None:
        last = self._layers - 1
        if self._layer != last:
            raise RuntimeError(
                f"the forward ended after layer {self._layer}, expected {last}: the model does not "
                "use every attention layer"
            )
        self.leave(last)
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
