"""A line of JSON per run, appended to a log file."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import orjson

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.statistics import RunFigures


def append_run(path: Path, tag: str, figures: RunFigures, settings: dict[str, object]) -> None:
    """Append timestamp, ``tag``, figures and what they were measured with.

    Raises BenchmarkError when the file cannot be written.
    """
    row = {
        "timestamp": datetime.now().isoformat(),
        "tag": tag,
        "summary": figures.summary,
        "round": figures.rounds,
        "errors": figures.errors,
        "settings": {name: _plain(value) for name, value in settings.items()},
    }
    try:
        with path.open("ab") as file:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise BenchmarkError(
            f"cannot write to {path} ({error.strerror}): change --log-file"
        ) from None


def _plain(value: object) -> object:
    # JSON has no infinity, and orjson would write null.
    return "inf" if isinstance(value, float) and math.isinf(value) else value
