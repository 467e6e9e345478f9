"""``Stores``: what the tree wants stored, begun step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.managers.cache_controller import (
    CacheOperation,
    HiCacheAck,
    HiCacheController,
    device_module,
)

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache


class _Step(NamedTuple):
    """The nodes that were queued in one step."""

    operation: CacheOperation
    pages: torch.Tensor
    """int64 [pages] on the pool's device."""
    host_pages: torch.Tensor
    """The same on the host, once `ready` has come."""
    ready: device_module.Event
    computed: device_module.Event
    """Has come when the forwards are over that were launched by then."""


class Stores:
    """Between the controller, in which the tree queues a store for each node, and the pool.

    The controller would begin every one by itself, on the scheduler's thread, while the GPU waits
    for the next forward where many requests end at once. Here those of a step begin together.
    And they begin when their pages are known on the host, which the copy engines need: they leave
    the SMs to the forward. Pages are named by tensors on the device, behind the forward that is
    running; so they are copied to the host on the scheduler's stream, and looked at in a later
    step. On the CPU all this happens at once. Scheduler thread only.

    The last token of a request that has ended may still be written by a decode in flight, which the
    scheduler's stream does not come after (see ``Loads``): so a store comes after all forwards that
    were launched when its nodes were queued.
    """

    def __init__(
        self,
        controller: HiCacheController,
        pool: DonorKVCache,
        record_behind_forwards: Callable[[device_module.Event], None],
    ) -> None:
        """``record_behind_forwards``: has an event come when what is launched now is over."""
        self._controller = controller
        self._pool = pool
        self._record_behind_forwards = record_behind_forwards
        self._waiting: deque[_Step] = deque()
        controller.start_writing = _later

    @property
    def waiting(self) -> int:
        """Nodes that are to be stored and whose store has not begun."""
        queued: int = len(self._controller.write_queue)
        return queued + sum(len(step.operation.node_ids) for step in self._waiting)

    def step(self) -> None:
        """Take what was queued since the last call, and begin what has its pages. Never waits."""
        if self._controller.write_queue:
            self._waiting.append(self._take())
        while self._waiting and self._waiting[0].ready.query():
            self._begin(self._waiting.popleft())

    def begin_all(self) -> None:
        """Begin all that was queued: waits for the forward that is running."""
        self.step()
        while self._waiting:
            self._waiting[0].ready.synchronize()
            self._begin(self._waiting.popleft())

    def clear(self) -> None:
        """Forget what has not begun: its tree was flushed."""
        self._waiting.clear()

    def _take(self) -> _Step:
        queue = self._controller.write_queue
        operation = CacheOperation.merge_ops(queue)
        queue.clear()
        pages = self._pool.pages_of(operation.device_indices)
        host_pages = pages
        if pages.is_cuda:
            host_pages = torch.empty(len(pages), dtype=pages.dtype, pin_memory=True)
            host_pages.copy_(pages, non_blocking=True)
        ready, computed = device_module.Event(), device_module.Event()
        ready.record()
        self._record_behind_forwards(computed)
        return _Step(operation, pages, host_pages, ready, computed)

    def _begin(self, step: _Step) -> None:
        stream, done = self._controller.write_stream, device_module.Event()
        with device_module.stream(stream):
            step.computed.wait(stream)
            step.ready.wait(stream)  # the pages' numbers
            self._pool.store(step.operation.host_indices, step.pages, step.host_pages.numpy())
            if step.pages.is_cuda:
                step.pages.record_stream(stream)
            done.record()
        acknowledgement = HiCacheAck(step.ready, done, step.operation.node_ids)
        self._controller.ack_write_queue.append(acknowledgement)


def _later() -> None:
    """In place of the controller's ``start_writing``, where a node has been queued."""
