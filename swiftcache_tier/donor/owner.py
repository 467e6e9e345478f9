"""A donor that one receiver owns: it ends with its owner, and is not killed along with it."""

from __future__ import annotations

import os
import select
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError


class Owner(NamedTuple):
    """The process that a donor serves alone."""

    pid: int
    pidfd: int
    """Becomes readable when the process ends; kept for as long as the donor runs."""

    @property
    def has_ended(self) -> bool:
        readable, _, _ = select.select([self.pidfd], [], [], 0)
        return bool(readable)


def watch_owner(pid: int) -> Owner:
    """The owner with that process id. Raises SwiftCacheError when there is no such process."""
    try:
        return Owner(pid, os.pidfd_open(pid))
    except OSError as error:
        raise SwiftCacheError(
            f"owner process {pid} cannot be watched: {error.strerror}; give the process id of a "
            f"running receiver with --owner-pid"
        ) from error


def leave_owners_tree() -> None:
    """Go on as a process that does not descend from the owner; call it with one thread running.

    Servers end with SIGKILL for all their descendants. A donor that dies so leaves its sockets
    behind, so it goes on in a child that no ancestor is left of: the parent prints the child's
    process id and ends, and only then does the child return from here.
    """
    returns_at_end, held_by_parent = os.pipe()
    child = os.fork()
    if child:
        try:
            print(child, flush=True)
        finally:
            os._exit(0)  # nothing of the parent's is cleaned up: the child has it all
    os.close(held_by_parent)
    os.setsid()
    os.read(returns_at_end, 1)
    os.close(returns_at_end)
