"""How a server's processes end on an error of the user's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.swiftcache import EXIT_BAD_INPUT
from swiftcache_tier.errors import SwiftCacheError


@contextlib.contextmanager
def one_line_exit() -> Iterator[None]:
    """End the process on a SwiftCacheError, after one line on stderr.

    SGLang would print a traceback for an exception. The main process follows a scheduler that ends
    so (`end_as_scheduler`).
    """
    try:
        yield
    except SwiftCacheError as error:
        print(f"swiftcache: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_BAD_INPUT) from None


def end_as_scheduler(original: Callable[..., Any], readers: Any, processes: Any) -> Any:
    """_wait_for_scheduler_ready, of the main process: a scheduler has said why it ended.

    processes: of multiprocessing.
    """
    try:
        return original(readers, processes)
    except RuntimeError:
        if any(process.exitcode == EXIT_BAD_INPUT for process in processes):
            raise SystemExit(EXIT_BAD_INPUT) from None
        raise
