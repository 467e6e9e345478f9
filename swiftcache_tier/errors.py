"""The error that a user of the donor tier sees."""

from __future__ import annotations


class SwiftCacheError(Exception):
    """What was wrong, what was expected and what to do about it, in one line.

    Anything that a user, an operator or a peer can cause is raised as this class; breaches of a
    contract inside the program are `ValueError`.
    """

    def __init__(self, message: str) -> None:
        # Text quoted from outside (a name, a path, an errno string) may bring line breaks along.
        super().__init__(" ".join(message.splitlines()))
