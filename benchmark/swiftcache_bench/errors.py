"""The one kind of error that reaches a user of the scripts."""

from __future__ import annotations


class BenchmarkError(Exception):
    """One line: what was wrong, what was expected, what to do."""
