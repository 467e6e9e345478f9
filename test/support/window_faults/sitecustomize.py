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


def _poison(pool_module: ModuleType) -> None:
    streamer_class = pool_module.LayerStreamer
    pools: list[Any] = []
    create, wrap = pool_module.StreamKVPool._create_buffers_normal, streamer_class.wrap_model

    def create_buffers(self: Any) -> None:
        create(self)
        pools.append(self)

    def wrap_model(self: Any, forward: Any) -> Any:
        streamed = wrap(self, forward)

        def poisoned(*args: Any, **kwargs: Any) -> Any:
            output = streamed(*args, **kwargs)
            for pool in pools:
                for buffer in (*pool.k_buffer[:2], *pool.v_buffer[:2]):
                    buffer[pool.first_window_slot :] = float("nan")
            return output

        return poisoned

    pool_module.StreamKVPool._create_buffers_normal = create_buffers
    streamer_class.wrap_model = wrap_model


def _delay(module: ModuleType) -> None:
    import torch

    cycles = int(os.environ["TEST_DELAY_CYCLES"])

    def late(original: Any, stream: str) -> Any:
        def move(self: Any, layer: int) -> None:
            with torch.cuda.stream(getattr(self, stream)):
                torch.cuda._sleep(cycles)
            original(self, layer)

        return move

    for name in ("gather", "scatter"):
        move = getattr(module.CudaMover, name)
        setattr(module.CudaMover, name, late(move, f"_{name}s"))


_PACKAGE = "sglang.srt.swiftcache.layer_stream"
if os.environ.get("TEST_POISON_WINDOW"):
    wrapt.register_post_import_hook(_poison, f"{_PACKAGE}.pool")
if os.environ.get("TEST_DELAY_CYCLES"):
    wrapt.register_post_import_hook(_delay, f"{_PACKAGE}.movers")
