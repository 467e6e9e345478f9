"""A plugin of SGLang that breaks the server it is in, for as long as a file is there.

``$FAULTY_DIR/stuck``: the scheduler thread does not come back from a forward.
``$FAULTY_DIR/leak``: locks on prefixes are not given back, until the whole pool is locked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FOLDER = Path(os.environ["FAULTY_DIR"])


def register() -> None:
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_batch", _stuck, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.mem_cache.hiradix_cache.HiRadixCache.dec_lock_ref", _leak, HookType.AROUND
    )


def _stuck(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    while (FOLDER / "stuck").exists():
        time.sleep(0.05)
    return original(*args, **kwargs)


def _leak(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if (FOLDER / "leak").exists():
        return DecLockRefResult(delta=0)
    return original(*args, **kwargs)
