"""Whether the server that answers is the one that was started, and runs what was asked of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from swiftcache_bench.server.processes import ProcessTree


@dataclass(frozen=True)
class FlagCheck:
    """Flags of a command line against ``/server_info``.

    ``confirmed`` and ``unlisted`` (the server does not list them) by name; ``differing`` as
    (flag, what was asked, what runs).
    """

    confirmed: tuple[str, ...]
    unlisted: tuple[str, ...]
    differing: tuple[tuple[str, str, str], ...]


def check_flags(flags: Sequence[str], info: dict[str, Any]) -> FlagCheck:
    """Compare each ``--flag`` of ``flags`` with the field of its name in ``info``."""
    confirmed, unlisted, differing = [], [], []
    for flag, values in _parse(flags).items():
        field = flag.removeprefix("--").replace("-", "_")
        if field not in info:
            unlisted.append(flag)
        elif _matches(values, info[field]):
            confirmed.append(flag)
        else:
            differing.append((flag, " ".join(values) or "on", str(info[field])))
    return FlagCheck(tuple(confirmed), tuple(unlisted), tuple(differing))


def foreign_listeners(tree: ProcessTree, port: int) -> set[int]:
    """Processes outside ``tree`` that listen on ``port``, as far as the system says."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return set()
    listeners = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
    }
    return {pid for pid in listeners if pid is not None} - {p.pid for p in tree.members()}


def _parse(flags: Sequence[str]) -> dict[str, list[str]]:
    """{flag: values}; the last one counts, as for argparse."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in flags:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found[flag] = values = [value] if equals else []
        else:
            values.append(word)
    return found


def _matches(values: list[str], actual: Any) -> bool:
    if not values:
        return actual is True or isinstance(actual, list)
    if isinstance(actual, list):
        return [str(one) for one in actual] == values
    if len(values) != 1:
        return False
    (value,) = values
    if isinstance(actual, bool) or actual is None:
        return value.lower() == str(actual).lower()
    if isinstance(actual, int | float):
        return _number(value) == float(actual)
    if isinstance(actual, dict):
        return bool(_json(value) == actual)
    return value == str(actual)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
