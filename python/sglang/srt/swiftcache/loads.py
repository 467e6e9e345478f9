"""``Loads``: has loads wait for what a forward in flight may yet write where they load to."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.cache_controller import HiCacheController, device_module


class Loads:
    """Between the tree and the controller, which begins loads behind the scheduler's stream.

    That stream does not come after a decode in flight, but only after what the decode has read of
    the scheduler's tables. And SGLang launches a decode before it knows who ends with the one
    before: for a request that has ended, a token is still to be written into a page that may have
    been freed by now, handed out again, and be loaded into. So a load comes after the forwards that
    were in flight when a request last ended; most of the time they are over. Other pages that a
    forward in flight writes belong to requests that run. Scheduler thread only.
    """

    def __init__(
        self,
        controller: HiCacheController,
        record_behind_forwards: Callable[[device_module.Event], None],
    ) -> None:
        """``record_behind_forwards``: has an event come when what is launched now is over."""
        self._controller = controller
        self._record_behind_forwards = record_behind_forwards
        self._begin = controller.start_loading
        self._in_flight = device_module.Event()
        controller.start_loading = self._start_loading

    def request_ended(self) -> None:
        """Its pages are free, or the tree's."""
        self._record_behind_forwards(self._in_flight)

    def _start_loading(self) -> int:
        if self._controller.load_queue:
            self._in_flight.wait(self._controller.load_stream)
        consumer: int = self._begin()
        return consumer
