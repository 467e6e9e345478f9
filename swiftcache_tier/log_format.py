"""Log lines as JSON, for programs that read logs (`SWIFTCACHE_LOG_FORMAT=json`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from swiftcache_tier.errors import SwiftCacheError

VARIABLE = "SWIFTCACHE_LOG_FORMAT"
FORMATS = ("text", "json")

# What every record has; anything else was given by the caller, in `extra`.
_STANDARD = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"])


def json_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for JSON. Raises SwiftCacheError for any other format."""
    wanted = environ.get(VARIABLE, "text")
    if wanted not in FORMATS:
        raise SwiftCacheError(f"{VARIABLE} is {wanted!r}: expected {' or '.join(FORMATS)}")
    return wanted == "json"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, process, and the `extra` fields."""

    def __init__(self, **fields: Any) -> None:
        """`fields` are in every line, such as the donor's name."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            **self._fields,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_SERIALIZE_NUMPY).decode()


def log_as_json(*loggers: str) -> None:
    """Let these loggers, and those below, write JSON to stderr, nowhere else. Idempotent."""
    for name in loggers:
        logger = logging.getLogger(name)
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logger.handlers = [handler]
        logger.propagate = False
