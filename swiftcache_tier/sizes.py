"""Byte counts as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

from swiftcache_tier.errors import SwiftCacheError

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BYTES_PER_UNIT = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS)},
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), start=1)},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")
# Sizes end up in off_t and ssize_t.
_LARGEST_BYTES = 2**63 - 1


def parse_size(text: str) -> int:
    """Bytes that `text` names: "40GiB", "1.5 GiB", "512MB" or plain bytes such as "1024".

    KiB, MiB, GiB, TiB are powers of 1024 and KB, MB, GB, TB powers of 1000, in any case. A part of
    a byte is dropped. Raises SwiftCacheError for anything else, negative sizes included.
    """
    match = _SIZE.fullmatch(text.strip())
    unit_bytes = _BYTES_PER_UNIT.get(match[2].lower()) if match else None
    if match is None or unit_bytes is None:
        raise SwiftCacheError(
            f"{text!r} is not a size: write a number and a unit, as in 40GiB, 512MiB or 1024"
        )
    size_bytes = int(Decimal(match[1]) * unit_bytes)
    if size_bytes > _LARGEST_BYTES:
        raise SwiftCacheError(f"size {text!r} is too large: the most that fits is 8388607TiB")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """`size_bytes` (0 or more) in the largest unit that keeps it at 1 or above: "1.5 GiB".

    Rounded to a tenth of the unit, so it is for people to read and not for programs to parse.
    """
    power = 0
    while (tenths := _rounded(size_bytes * 10, 1024**power)) >= 10240:
        if power == len(_BINARY_UNITS) - 1:
            break
        power += 1
    whole, tenth = divmod(tenths, 10)
    return f"{whole}.{tenth} {_BINARY_UNITS[power]}" if tenth else f"{whole} {_BINARY_UNITS[power]}"


def count_extents(extents: int) -> str:
    """As people write it: "1 extent", "8 extents"."""
    return f"{extents} extent" if extents == 1 else f"{extents} extents"


def _rounded(number: int, divisor: int) -> int:
    return (number + divisor // 2) // divisor
