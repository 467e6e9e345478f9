"""Zeros for the memory of a GPU, at little cost to the GPU."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from cuda.bindings import driver as cu  # type: ignore[import-untyped]

from swiftcache_tier.cuda_driver import CudaError, PrimaryContext, call
from swiftcache_tier.extents import device_memory

logger = logging.getLogger(__name__)


class ZeroFill:
    """Fills memory of one device with zeros.

    Making, sharing and freeing memory needs no context on its device, writing zeros does, and a
    context takes some hundred MiB there. So one is held only from the first fill to
    `context_idle_s` after the last; starting it again takes a few tenths of a second. With None it
    is kept. Any thread may call; one fills at a time.
    """

    def __init__(self, ordinal: int, context_idle_s: float | None) -> None:
        self._ordinal = ordinal
        self._context_idle_s = context_idle_s
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._last_fill_s = 0.0

    def fill(self, handle: Any, size_bytes: int) -> None:
        """Zero the `size_bytes` of memory behind `handle`; returns when it reads so.

        Raises CudaError, ENOMEM if the device has no room for a context.
        """
        with self._lock:
            if self._stream is None:
                self._stream = _Stream(self._ordinal)
                if self._context_idle_s is not None:
                    threading.Thread(
                        target=self._close_when_idle,
                        args=(self._context_idle_s,),
                        name="idle-context",
                        daemon=True,
                    ).start()
            try:
                self._stream.fill(handle, size_bytes)
            finally:
                self._last_fill_s = time.monotonic()

    def _close_when_idle(self, idle_s: float) -> None:
        while True:
            with self._lock:
                left_s = self._last_fill_s + idle_s - time.monotonic()
                if left_s <= 0 and self._stream is not None:
                    stream, self._stream = self._stream, None
                    try:
                        stream.close()
                    except CudaError as error:
                        logger.warning("cuda:%d keeps a context: %s", self._ordinal, error)
                    return
            time.sleep(left_s)


class _Stream:
    """A context on a device and a stream in it, which waits for nobody else's work."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._context = PrimaryContext(ordinal)
        try:
            with self._context.current():
                no_waiting = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._stream = call(cu.cuStreamCreate, no_waiting)
        except BaseException:
            self._context.close()
            raise

    def fill(self, handle: Any, size_bytes: int) -> None:
        with self._context.current():
            address = device_memory.reserve(size_bytes, 0)
            try:
                device_memory.map_at(address, size_bytes, handle)
                try:
                    device_memory.allow_access(address, size_bytes, self._ordinal)
                    call(cu.cuMemsetD32Async, address, 0, size_bytes // 4, self._stream)
                    call(cu.cuStreamSynchronize, self._stream)
                finally:
                    device_memory.unmap(address, size_bytes)
            finally:
                device_memory.give_back(address, size_bytes)

    def close(self) -> None:
        with self._context.current():
            call(cu.cuStreamDestroy, self._stream)
        self._context.close()
