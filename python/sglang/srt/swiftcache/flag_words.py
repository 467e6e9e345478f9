"""``off`` and ``auto``, as flags, YAML files and keyword arguments say them."""

from __future__ import annotations

from typing import Any

OFF, AUTO = "off", "auto"


def word_of(value: Any) -> str:
    """What a field says, in lower case: of the two, or something else that it takes."""
    word = OFF if value is None else str(value).strip().lower()
    # a key of a YAML file may arrive as a boolean, and one with nothing behind it as "None"
    return {"false": OFF, "none": AUTO, "true": AUTO}.get(word, word)
