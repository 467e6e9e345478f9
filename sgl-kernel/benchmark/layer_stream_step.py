"""A decode step that streams: stand-in layers of Qwen3-8B, and the copies beside them.

Copies are queued as `LayerStreamer` and `CudaMover` of the overlay queue them, or with the changes
that a variant makes. The weights are random and nothing is predicted: a layer launches what a
layer launches and reads as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from layer_stream_variants import Variant
from torch.nn import functional

DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """Sizes of a model's layers."""

    layers: int
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


class Mover(Protocol):
    """Queues the copy of one layer on the current stream."""

    def move(self, layer: int) -> None: ...


class Streams(NamedTuple):
    """The same one twice where gathers and scatters are to follow each other."""

    gathers: torch.cuda.Stream
    scatters: torch.cuda.Stream


class Copies:
    """The copies of one step, on streams of their own. Made anew for each step that is queued."""

    def __init__(
        self, gather: Mover, scatter: Mover, layers: int, variant: Variant, streams: Streams
    ) -> None:
        self._gather, self._scatter = gather, scatter
        self._layers = layers
        self._variant = variant
        self._streams = streams
        self._device = streams.gathers.device
        self._gathered: list[torch.cuda.Event] = []

    def begin(self) -> None:
        self._follow(self._streams.scatters, self._main)
        at_entry = self._variant.order == "at-entry"
        for _ in range(self._variant.sets - 1 if at_entry else self._variant.sets):
            self._gather_next()

    def enter(self, layer: int) -> None:
        """Before anything of a layer's KV is touched."""
        self._main.wait_event(self._gathered[layer])
        if self._variant.order == "at-entry":
            if layer > 0:
                self._scatter_layer(layer - 1)
            self._gather_next()

    def leave(self, layer: int) -> None:
        """After a layer's attention."""
        if self._variant.order == "as-now":
            self._scatter_layer(layer)
            self._gather_next()

    def end(self) -> None:
        if self._variant.order == "at-entry":
            self._scatter_layer(self._layers - 1)
        self._follow(self._main, self._streams.scatters)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def _gather_next(self) -> None:
        layer = len(self._gathered)
        if layer < self._layers:
            self._follow(self._streams.gathers, self._streams.scatters)
            with torch.cuda.stream(self._streams.gathers):
                self._gather.move(layer)
            self._gathered.append(self._mark(self._streams.gathers))

    def _scatter_layer(self, layer: int) -> None:
        self._follow(self._streams.scatters, self._main)
        with torch.cuda.stream(self._streams.scatters):
            self._scatter.move(layer)

    def _follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        stream.wait_event(self._mark(other))

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class Weights(NamedTuple):
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Sets(NamedTuple):
    """K and V of the layers that the device holds, [slots, kv_heads, head_dim] each.

    A layer has those of its number modulo their number, regular slots too: what a layer reads in
    between leaves nothing of them in the L2 cache.
    """

    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of q [batch, heads, head_dim] over K and V of a layer."""


class Model:
    """`distinct_layers` layers, taken in turn. They must be more than the L2 cache holds."""

    def __init__(self, shape: Shape, distinct_layers: int, device: torch.device) -> None:
        self.shape = shape
        qkv_width = shape.heads * shape.head_dim + 2 * shape.kv_width

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=DTYPE, device=device) * columns**-0.5

        self._weights = [
            Weights(
                matrix(qkv_width, shape.hidden),
                matrix(shape.hidden, shape.heads * shape.head_dim),
                matrix(2 * shape.intermediate, shape.hidden),
                matrix(shape.hidden, shape.intermediate),
            )
            for _ in range(distinct_layers)
        ]

    def step(
        self,
        x: torch.Tensor,
        new_slots: torch.Tensor,
        sets: Sets,
        attention: Attention,
        copies: Copies | None,
    ) -> torch.Tensor:
        """Queue all layers of one token a request: x [batch, hidden], new_slots int64 [batch]."""
        if copies:
            copies.begin()
        for layer in range(self.shape.layers):
            x = self._layer(layer, x, new_slots, sets, attention, copies)
        if copies:
            copies.end()
        return x

    def _layer(
        self,
        layer: int,
        x: torch.Tensor,
        new_slots: torch.Tensor,
        sets: Sets,
        attention: Attention,
        copies: Copies | None,
    ) -> torch.Tensor:
        shape, weights = self.shape, self._weights[layer % len(self._weights)]
        q_width = shape.heads * shape.head_dim
        qkv = functional.linear(_norm(x), weights.qkv)
        q, k, v = qkv.split([q_width, shape.kv_width, shape.kv_width], dim=-1)
        q = _norm(q.reshape(-1, shape.heads, shape.head_dim))
        k = _norm(k.reshape(-1, shape.kv_heads, shape.head_dim))
        v = v.reshape(-1, shape.kv_heads, shape.head_dim)
        if copies:
            copies.enter(layer)
        all_k, all_v = sets.k[layer % len(sets.k)], sets.v[layer % len(sets.v)]
        all_k.index_copy_(0, new_slots, k)
        all_v.index_copy_(0, new_slots, v)
        attended = attention(q, all_k, all_v)
        if copies:
            copies.leave(layer)
        x = x + functional.linear(attended.reshape(-1, q_width), weights.o)
        gate, up = functional.linear(_norm(x), weights.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, weights.down)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])
