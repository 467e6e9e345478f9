"""`swiftcache status`: what lends how much to whom."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiftcache_tier.cli.arguments import add_runtime_dir
from swiftcache_tier.control.credentials import user_name
from swiftcache_tier.control.door import NoDonor
from swiftcache_tier.control.messages import ReceiverStatus, StatusReply
from swiftcache_tier.control.query import Unresponsive, query_status
from swiftcache_tier.control.runtime_dir import DonorPaths, check_runtime_dir, list_donors
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import describe_device
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

_ASKED_AT_ONCE = 16


class DonorReport(NamedTuple):
    """One donor as it was found."""

    paths: DonorPaths
    state: str
    """"serving", "draining", "drained", "failed", "stale", "unresponsive" or "refused"."""
    problem: str | None
    reply: StatusReply | None


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show all donors, and who holds their memory",
        description="Show every donor of the runtime directory, and who holds its memory.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    runtime_dir: Path = arguments.runtime_dir
    check_runtime_dir(runtime_dir)
    reports = ask_all(runtime_dir, settings)
    if arguments.json:
        document = {"runtime_dir": str(runtime_dir), "donors": [_as_json(r) for r in reports]}
        sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
    elif reports:
        _print_tables(reports)
    else:
        print(
            f"no donors in {runtime_dir}: start one with swiftcache donor --device host "
            f"--size 1GiB, or name another folder with --runtime-dir"
        )
    return 0


def ask_all(runtime_dir: Path, settings: Settings) -> list[DonorReport]:
    """Every donor of the folder, by name; takes `settings.status_timeout_s` at most, for each of
    a few at once."""
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as askers:
        return list(askers.map(lambda paths: _ask(paths, settings), list_donors(runtime_dir)))


def lent_bytes(reply: StatusReply) -> int:
    """What is not free, in whatever state of its lease."""
    held = sum(n for state, n in reply.extents.items() if state != LeaseState.FREE)
    return held * reply.extent_bytes


def receiver_limits(reply: StatusReply) -> dict[str, int]:
    """Bytes that "each receiver" or one of that name may hold at most, where there is a limit."""
    each = {} if reply.each_limit_bytes is None else {"each receiver": reply.each_limit_bytes}
    return each | reply.receiver_limit_bytes


def describe_limits(limits: dict[str, int]) -> str:
    return ", ".join(f"{whom} at most {format_size(most)}" for whom, most in limits.items())


def _ask(paths: DonorPaths, settings: Settings) -> DonorReport:
    try:
        reply = query_status(paths, settings)
    except NoDonor as error:
        return DonorReport(paths, "stale", str(error), None)
    except Unresponsive as error:
        return DonorReport(paths, "unresponsive", str(error), None)
    except SwiftCacheError as error:
        return DonorReport(paths, "refused", str(error), None)
    return DonorReport(paths, reply.state, None, reply)


def _as_json(report: DonorReport) -> dict[str, Any]:
    donor = {
        "name": report.paths.name,
        "spec": report.paths.spec,
        "state": report.state,
        "problem": report.problem,
    }
    reply = report.reply
    if reply is None:
        return donor
    return donor | {
        "device": reply.device,
        "device_uuid": reply.device_uuid,
        "device_model": reply.device_model,
        "pid": reply.pid,
        "owner_pid": reply.owner_pid,
        "extent_bytes": reply.extent_bytes,
        "extents": reply.extents,
        "bytes": sum(reply.extents.values()) * reply.extent_bytes,
        "bytes_lent": lent_bytes(reply),
        "elastic": reply.elastic,
        "bytes_kept": reply.kept * reply.extent_bytes,
        "limits": {
            "bytes": reply.limit_bytes,
            "each_bytes": reply.each_limit_bytes,
            "receiver_bytes": reply.receiver_limit_bytes,
        },
        "receivers": [
            {
                "name": receiver.name,
                "pid": receiver.pid,
                "user": user_name(receiver.uid),
                "extents": receiver.extents,
                "bytes": receiver.bytes,
                "heartbeat_age_s": round(receiver.heartbeat_age_s, 3),
                "link": receiver.link,
                "gb_per_s": receiver.gb_per_s and round(receiver.gb_per_s, 1),
            }
            for receiver in reply.receivers
        ],
    }


def _print_tables(reports: list[DonorReport]) -> None:
    donors = Table("DONOR", "DEVICE", "STATE", "SIZE", "LENT", "EXTENTS", "PID", "SPEC", box=None)
    receivers = Table(
        *("RECEIVER", "PID", "USER", "DONOR", "HOLDS", "EXTENTS", "LINK", "HEARD"), box=None
    )
    for report in reports:
        reply = report.reply
        if reply is None:
            donors.add_row(
                *_texts(report.paths.name, "", report.state, "", "", "", "", report.paths.spec)
            )
            continue
        donors.add_row(
            *_texts(
                reply.name,
                describe_device(reply.device, reply.device_uuid, reply.device_model),
                _state(reply),
                format_size(sum(reply.extents.values()) * reply.extent_bytes),
                format_size(lent_bytes(reply)),
                _states(reply.extents),
                str(reply.pid),
                report.paths.spec,
            )
        )
        for receiver in reply.receivers:
            receivers.add_row(
                *_texts(
                    receiver.name,
                    str(receiver.pid),
                    user_name(receiver.uid),
                    reply.name,
                    format_size(receiver.bytes),
                    _states(receiver.extents),
                    _link(receiver),
                    f"{receiver.heartbeat_age_s:.1f} s ago",
                )
            )
    # Into a file or a pipe, lines are not wrapped: they are what people grep.
    console = Console(width=None if sys.stdout.isatty() else 500)
    console.print(donors)
    if receivers.row_count:
        console.print()
        console.print(receivers)
    for report in reports:
        if report.problem is not None:
            console.print(Text(f"{report.paths.name}: {report.problem}"))
        if report.reply is not None and (limits := receiver_limits(report.reply)):
            console.print(Text(f"{report.paths.name} lends {describe_limits(limits)}"))


def _texts(*cells: str) -> list[Text]:
    """Cells that are shown as they are: rich reads markup in plain strings."""
    return [Text(cell) for cell in cells]


def _state(reply: StatusReply) -> str:
    words = [reply.state]
    if reply.owner_pid is not None:
        words.append("owned")
    if reply.elastic:
        words.append("elastic")
    if reply.limit_bytes is not None:
        words.append(f"at most {format_size(reply.limit_bytes)}")
    return ", ".join(words)


def _link(receiver: ReceiverStatus) -> str:
    if receiver.gb_per_s is None:
        return receiver.link or ""
    return f"{receiver.link}, {receiver.gb_per_s:.0f} GB/s"


def _states(extents: dict[str, int]) -> str:
    return ", ".join(f"{n} {state}" for state, n in extents.items() if n) or "none"
