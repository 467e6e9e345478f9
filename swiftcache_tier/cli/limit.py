"""`swiftcache limit`: what a donor lends at most."""

from __future__ import annotations

import argparse
from typing import Any

from swiftcache_tier.cli.arguments import add_donor, size
from swiftcache_tier.cli.status import describe_limits, lent_bytes, receiver_limits
from swiftcache_tier.control.messages import PROTOCOL, LimitRequest, StatusReply
from swiftcache_tier.control.query import ask, query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import count_extents, format_size


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "limit",
        help="limit what a donor lends, in all or to a receiver",
        description="Let a donor lend no more than SIZE: what is over is asked back at once. The "
        "limit holds until it is changed or the donor ends. After `swiftcache drain`, a limit in "
        "all lets the donor lend again.",
    )
    add_donor(parser)
    parser.add_argument(
        "size",
        type=_size_or_none,
        metavar="SIZE",
        help="as in 8GiB, rounded down to whole extents, one at least; 0 lends nothing, 'none' "
        "lifts the limit",
    )
    whom = parser.add_mutually_exclusive_group()
    whom.add_argument(
        "--receiver", metavar="NAME", help="limit what this receiver holds, by its name in status"
    )
    whom.add_argument(
        "--each",
        action="store_true",
        help="limit what each receiver holds that has no limit of its own",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    paths = donor_paths(arguments.runtime_dir, arguments.name)
    before = query_status(paths, settings)
    if arguments.size:
        _check_an_extent_fits(arguments.size, before)
    request = LimitRequest(
        protocol=PROTOCOL,
        bytes=arguments.size,
        receiver=arguments.receiver,
        each=arguments.each,
    )
    reply = ask(paths, request, settings)
    whom = arguments.receiver or ("each receiver" if arguments.each else "all receivers")
    amount = "without limit"
    if arguments.size is not None:
        extents = arguments.size // reply.extent_bytes
        amount = f"at most {format_size(extents * reply.extent_bytes)} ({count_extents(extents)})"
    asked_back = reply.extents[LeaseState.RECLAIMING] * reply.extent_bytes
    print(
        f"swiftcache: {reply.name} lends {whom} {amount}; {format_size(lent_bytes(reply))} are "
        f"lent now, {format_size(asked_back)} of it asked back"
    )
    if before.state == "drained" and reply.state != "drained":
        print(f"swiftcache: the drain of {reply.name} is lifted")
    if arguments.receiver and all(r.name != arguments.receiver for r in reply.receivers):
        kept = "" if arguments.size is None else ": the limit is kept for when one does"
        print(f"swiftcache: no receiver named {arguments.receiver} borrows from it now{kept}")
    others = _limits(reply)
    others.pop(whom, None)
    if others:
        print(f"swiftcache: limits that it also has: {describe_limits(others)}")
    return 0


def _limits(reply: StatusReply) -> dict[str, int]:
    of_all = {} if reply.limit_bytes is None else {"all receivers": reply.limit_bytes}
    return of_all | receiver_limits(reply)


def _check_an_extent_fits(size_bytes: int, donor: StatusReply) -> None:
    """Rounded down it would be nothing, and all that is lent would be asked back."""
    if size_bytes < donor.extent_bytes:
        raise SwiftCacheError(
            f"{format_size(size_bytes)} is less than one extent of {donor.name}, which are of "
            f"{format_size(donor.extent_bytes)}: give at least so much, or 0 to let it lend nothing"
        )


def _size_or_none(text: str) -> int | None:
    return None if text == "none" else size(text)
