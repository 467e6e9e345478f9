"""A flag of SGLang's that cannot stand beside one of SwiftCache's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Conflict(NamedTuple):
    """``present`` tells from the ``ServerArgs`` whether the flag was given."""

    flag: str
    present: Callable[[Any], bool]
    advice: str


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
