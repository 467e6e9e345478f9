"""`swiftcache drain`: take everything back from a donor's receivers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from swiftcache_tier.cli.arguments import add_donor, seconds
from swiftcache_tier.control.messages import PROTOCOL, DrainRequest, StatusReply
from swiftcache_tier.control.query import ask, query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

_LOOK_INTERVAL_S = 0.05
_NOT_DRAINED = 1


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="ask back all that a donor has lent, and let it lend no more",
        description="Ask back all that a donor has lent and wait for it. The donor goes on, a "
        "serving engine with all of its memory, and lends again after `swiftcache limit NAME none`."
        " Exit status 1 if something is still lent at the deadline.",
    )
    add_donor(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="how long to wait for it; default: the reclaim deadline (5)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    paths = donor_paths(arguments.runtime_dir, arguments.name)
    wait_s = settings.reclaim_deadline_s if arguments.wait is None else arguments.wait
    deadline_s = time.monotonic() + wait_s
    reply = ask(paths, DrainRequest(protocol=PROTOCOL), settings)
    while _lent(reply) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_INTERVAL_S)
        reply = query_status(paths, settings)
    if not (lent := _lent(reply)):
        print(
            f"swiftcache: {reply.name} is drained: nothing is lent until `swiftcache limit "
            f"{reply.name} none`, or until it is started again"
        )
        return 0
    holders = ", ".join(f"{r.name} (process {r.pid})" for r in reply.receivers if r.bytes)
    print(
        f"swiftcache: {reply.name} still lends {format_size(lent * reply.extent_bytes)} after "
        f"{wait_s:g} s, to {holders}: it comes back when they release it or end"
    )
    return _NOT_DRAINED


def _lent(reply: StatusReply) -> int:
    return sum(n for state, n in reply.extents.items() if state != LeaseState.FREE)
