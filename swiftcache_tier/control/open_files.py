"""How many extents a donor may have: each is an open file of its, and a number in messages."""

from __future__ import annotations

import resource

from swiftcache_tier.control.messages import EXTENTS_MAX
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

# Open files beside those for extents: the interpreter's own, and three for each session.
_OTHER_FILES = 64
_FILES_PER_SESSION = 3


def bytes_at_most(settings: Settings) -> int:
    """What a donor of standalone memory may have, in extents of the usual size.

    At least one of them, which may yet be too many.
    """
    limit, extents = _limit(), EXTENTS_MAX
    if limit is not None:
        extents = max(1, min(extents, limit - _open_files(0, settings)))
    return extents * settings.extent_bytes


def require_open_files(
    extents: int, extent_bytes: int, settings: Settings, *, option: str, for_extents: int
) -> int:
    """Open files of a donor with that many extents, which take `for_extents` of them.

    Raises SwiftCacheError, which advises larger extents by `option`, for more than the hard limit.
    """
    what = f"{extents} extents of {format_size(extent_bytes)}"
    if extents > EXTENTS_MAX:
        raise SwiftCacheError(
            f"{what} are too many, a donor has at most {EXTENTS_MAX}: choose larger ones with "
            f"{option}"
        )
    open_files, limit = _open_files(for_extents, settings), _limit()
    if limit is not None and open_files > limit:
        raise SwiftCacheError(
            f"{what} need {open_files} open files and the limit is {limit}: raise it (ulimit -Hn) "
            f"or choose larger extents with {option}"
        )
    return open_files


def _open_files(for_extents: int, settings: Settings) -> int:
    return for_extents + _OTHER_FILES + _FILES_PER_SESSION * settings.sessions_max


def _limit() -> int | None:
    """The hard one: a donor raises the soft limit itself. None where there is none."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard
