"""Make a server's layer window fail loudly: put this folder on its PYTHONPATH.

``TEST_POISON_WINDOW=1``: after each forward the window is filled with NaN, so that whatever is read
without having been gathered spoils the output. ``TEST_DELAY_CYCLES=N``: on a GPU, every gather and
scatter starts N clock cycles late, which shows an order that only seemed to be kept.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import wrapt


def _poison(module: ModuleType) -> None:
    pool_class = module.StreamKVPool
    create = pool_class._create_buffers_normal

    def create_buffers(self: Any) -> None:
        create(self)
        module.POISONED_POOLS = [self]

    pool_class._create_buffers_normal = create_buffers


def _poison_after_forwards(module: ModuleType) -> None:
    original = module.LayerStreamer.wrap_model

    def wrap_model(self: Any, forward: Any) -> Any:
        streamed = original(self, forward)

        def poisoned(*args: Any, **kwargs: Any) -> Any:
            output = streamed(*args, **kwargs)
            from sglang.srt.swiftcache.layer_stream import pool

            for each in pool.POISONED_POOLS:
                for buffer in (*each.k_buffer[:2], *each.v_buffer[:2]):
                    buffer[each.first_window_slot :] = float("nan")
            return output

        return poisoned

    module.LayerStreamer.wrap_model = wrap_model


def _delay(module: ModuleType) -> None:
    import torch

    cycles = int(os.environ["TEST_DELAY_CYCLES"])

    def late(original: Any) -> Any:
        def move(self: Any, layer: int) -> None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(cycles)
            original(self, layer)

        return move

    for name in ("gather", "scatter"):
        setattr(module.CudaMover, name, late(getattr(module.CudaMover, name)))


_PACKAGE = "sglang.srt.swiftcache.layer_stream"
if os.environ.get("TEST_POISON_WINDOW"):
    wrapt.register_post_import_hook(_poison, f"{_PACKAGE}.pool")
    wrapt.register_post_import_hook(_poison_after_forwards, f"{_PACKAGE}.streamer")
if os.environ.get("TEST_DELAY_CYCLES"):
    wrapt.register_post_import_hook(_delay, f"{_PACKAGE}.movers")
