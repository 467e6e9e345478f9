"""SGLang inside this process, for its CPU engine: to be imported before anything of SGLang is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

CPU_ENGINE = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}


@contextmanager
def cpu_engine_environment() -> Iterator[None]:
    """For importing SGLang. Afterwards a server that a test starts must find out by itself."""
    before = {name: os.environ.get(name) for name in CPU_ENGINE}
    os.environ.update(CPU_ENGINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


with cpu_engine_environment():
    import sglang.srt.plugins  # noqa: F401  # it looks at the environment once, here
