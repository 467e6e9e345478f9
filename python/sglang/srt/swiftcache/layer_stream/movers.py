"""What moves the window pages of a plan, one layer at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from swiftcache_kernel import LayerTransfer, PoolBuffers, layer_transfer

if TYPE_CHECKING:
    from sglang.srt.swiftcache.layer_stream.streamer import ForwardPlan


class PageMover(ABC):
    """Moves pages between the window and their home blocks. Scheduler thread only."""

    layer_bytes: int
    """K and V of one page in one layer."""

    @abstractmethod
    def load(self, plan: ForwardPlan) -> None:
        """Take over the pages and addresses of a forward, before anything of it is queued."""

    @abstractmethod
    def begin(self) -> None:
        """What is moved from now on comes after what the forward has queued so far."""

    @abstractmethod
    def gather(self, layer: int) -> None:
        """Home blocks -> window, one layer: after the scatters that are queued, and what they
        waited for."""

    @abstractmethod
    def scatter(self, layer: int) -> None:
        """Window -> home blocks, one layer of the pages that got tokens: after what the forward
        has queued so far."""

    @abstractmethod
    def await_gather(self, layer: int) -> None:
        """What the forward queues from now on comes after the gather of ``layer``."""

    @abstractmethod
    def join(self) -> None:
        """What the forward queues from now on comes after all that was moved."""

    @abstractmethod
    def mark_done(self) -> Callable[[], bool]:
        """Tells, at any time, whether all that was queued until now has completed."""

    @abstractmethod
    def wait_done(self) -> None:
        """Until all marked work has completed."""

    @abstractmethod
    def order_after_forward(self, stream: Any) -> None:
        """Let another stream wait for all marked work."""


class HostMover(PageMover):
    """Plain copies, which have finished on return."""

    def __init__(self, buffers: PoolBuffers) -> None:
        self._buffers = buffers
        self.layer_bytes = buffers.layout.layer_bytes
        self._in: LayerTransfer | None = None
        self._out: LayerTransfer | None = None

    def load(self, plan: ForwardPlan) -> None:
        self._in = self._transfer(plan.addresses, plan.pages)
        self._out = self._transfer(plan.new_addresses, plan.new_pages)

    def gather(self, layer: int) -> None:
        assert self._in is not None
        self._in.gather(layer)

    def scatter(self, layer: int) -> None:
        assert self._out is not None
        self._out.scatter(layer)

    def _transfer(self, addresses: Any, pages: Any) -> LayerTransfer:
        return layer_transfer(torch.from_numpy(addresses), torch.from_numpy(pages), self._buffers)

    def begin(self) -> None: ...

    def await_gather(self, layer: int) -> None: ...

    def join(self) -> None: ...

    def mark_done(self) -> Callable[[], bool]:
        return lambda: True

    def wait_done(self) -> None: ...

    def order_after_forward(self, stream: Any) -> None: ...


class CudaMover(PageMover):
    """Kernels on streams of their own, which graphs capture with the forward.

    The batch lies in fixed buffers on the device, its length too: a captured graph reads whatever
    was loaded before it is replayed.
    """

    def __init__(self, buffers: PoolBuffers, window_pages: int) -> None:
        """Compiles the kernels (seconds, the first time on a machine)."""
        from swiftcache_kernel.counted_transfer import CountedTransfer

        device = buffers.device
        self.layer_bytes = buffers.layout.layer_bytes
        self._device = device
        self._in = CountedTransfer(buffers, window_pages, gather=True)
        self._out = CountedTransfer(buffers, window_pages, gather=False)
        self._gathers = torch.cuda.Stream(device)
        self._scatters = torch.cuda.Stream(device)
        self._mark = torch.cuda.Event()
        self._gathered = [torch.cuda.Event() for _ in range(buffers.layout.layers)]
        self._done: torch.cuda.Event | None = None

    def load(self, plan: ForwardPlan) -> None:
        # On the forward's stream: the forward before, whose copies joined it, is done with them.
        self._in.load(plan.addresses, plan.pages)
        self._out.load(plan.new_addresses, plan.new_pages)

    def begin(self) -> None:
        self._follow(self._scatters, torch.cuda.current_stream(self._device))

    def gather(self, layer: int) -> None:
        self._follow(self._gathers, self._scatters)
        with torch.cuda.stream(self._gathers):
            self._in.move(layer)
            self._gathered[layer].record(self._gathers)

    def scatter(self, layer: int) -> None:
        self._follow(self._scatters, torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._scatters):
            self._out.move(layer)

    def await_gather(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._gathered[layer])

    def join(self) -> None:
        # Of the gathers, the last layer has waited for the last.
        self._follow(torch.cuda.current_stream(self._device), self._scatters)

    def _follow(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """What is queued on ``stream`` from now on comes after what is queued on ``other``."""
        self._mark.record(other)
        stream.wait_event(self._mark)

    def mark_done(self) -> Callable[[], bool]:
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(self._device))
        return self._done.query

    def wait_done(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def order_after_forward(self, stream: Any) -> None:
        if self._done is not None:
            stream.wait_event(self._done)
