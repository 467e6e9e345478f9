"""What `swiftcache top` shows: donors and servers as they stand, and how fast they move."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import orjson

from swiftcache_tier.cli.status import DonorReport, ask_all
from swiftcache_tier.settings import Settings

_ASKED_AT_ONCE = 16
# A server calls itself "model:port" to its donors.
_PORT = re.compile(r":(\d{1,5})\Z")


class ServerReport(NamedTuple):
    """One server as it was found."""

    url: str
    state: Mapping[str, Any] | None
    """`internal_states[0]["swiftcache"]` of its `/server_info`."""
    problem: str | None


class Sample(NamedTuple):
    """Everything at one moment."""

    at_s: float
    """Monotonic."""
    donors: list[DonorReport]
    servers: list[ServerReport]


class Rates(NamedTuple):
    """What moved between two samples, per second."""

    load_gb_per_s: float
    store_gb_per_s: float


def take_sample(runtime_dir: Path, urls: Iterable[str], settings: Settings) -> Sample:
    """Ask the donors of a folder, the servers that borrow from them, and those at `urls`.

    Servers are looked for on this machine's loopback address, at the port that is part of the name
    under which they borrow. Whoever does not answer in `settings.status_timeout_s` is shown so.
    """
    donors = ask_all(runtime_dir, settings)
    found = dict.fromkeys(url.rstrip("/") for url in urls)
    for report in donors:
        for receiver in report.reply.receivers if report.reply else ():
            port = _PORT.search(receiver.name)
            if port is not None:
                found.setdefault(f"http://127.0.0.1:{port[1]}")
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as askers:
        servers = list(askers.map(lambda url: _ask(url, settings.status_timeout_s), found))
    return Sample(time.monotonic(), donors, servers)


def donor_rates(before: Sample | None, now: Sample, url: str, donor: str) -> Rates | None:
    """Between a server and a donor; None where there is nothing to compare with."""
    seen = None if before is None else _state(before, url)
    state = _state(now, url)
    if before is None or seen is None or state is None or now.at_s <= before.at_s:
        return None
    first, last = (s["bytes_by_donor"].get(donor, {"load": 0, "store": 0}) for s in (seen, state))
    span_s = now.at_s - before.at_s
    loaded, stored = (last[way] - first[way] for way in ("load", "store"))
    if min(loaded, stored) < 0:  # another server has come at its place
        return None
    return Rates(loaded / span_s / 1e9, stored / span_s / 1e9)


def request_rate(before: Sample | None, now: Sample, url: str) -> float | None:
    """Requests per second of a server; None where there is nothing to compare with."""
    seen = None if before is None else _state(before, url)
    state = _state(now, url)
    if before is None or seen is None or state is None or now.at_s <= before.at_s:
        return None
    answered: int = state["requests"] - seen["requests"]
    return None if answered < 0 else answered / (now.at_s - before.at_s)


def _state(sample: Sample, url: str) -> Mapping[str, Any] | None:
    return next((server.state for server in sample.servers if server.url == url), None)


def _ask(url: str, timeout_s: float) -> ServerReport:
    try:
        with urlopen(f"{url}/server_info", timeout=timeout_s) as answer:
            state = orjson.loads(answer.read())["internal_states"][0]["swiftcache"]
    except HTTPError as error:
        hint = ": it wants an API key" if error.code == 401 else ""
        return ServerReport(url, None, f"answered {error.code}{hint}")
    except (OSError, ValueError) as error:  # a malformed URL too
        return ServerReport(url, None, f"does not answer: {error}")
    except (KeyError, IndexError, TypeError):
        return ServerReport(url, None, "is no server with --swiftcache-donors")
    return ServerReport(url, state, None)
