"""Work that must come after every forward that has been launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardFence:
    """Queues work behind the forwards in flight, which may still write pages that are free by now.

    On the CPU a forward has finished when its launch returns, and so has the work.
    """

    def __init__(self, forward_stream: Any, device: str) -> None:
        """``forward_stream``: the scheduler's."""
        self._stream = forward_stream if torch.device(device).type == "cuda" else None

    def queue(self, work: Callable[[], None]) -> Callable[[], bool]:
        """Do it after all that is on the forward stream. Returns what tells whether it is done.

        What the calling thread queues on its own stream from now on comes after the work.
        """
        if self._stream is None:
            work()
            return lambda: True
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            work()
            done.record()
        torch.cuda.current_stream().wait_event(done)
        query: Callable[[], bool] = done.query
        return query
