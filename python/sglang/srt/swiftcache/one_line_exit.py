"""How a server's processes end on an error of the user's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from sglang.srt.swiftcache import EXIT_BAD_INPUT
from swiftcache_tier.errors import SwiftCacheError


@contextlib.contextmanager
def one_line_exit() -> Iterator[None]:
    """End the process on a SwiftCacheError, after one line on stderr.

    SGLang would print a traceback for an exception; the main process reports the exit.
    """
    try:
        yield
    except SwiftCacheError as error:
        print(f"swiftcache: {error}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_BAD_INPUT) from None
