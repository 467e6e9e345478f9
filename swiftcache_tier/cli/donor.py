"""`swiftcache donor`: lend memory."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import uvloop

from swiftcache_tier.cli.arguments import add_runtime_dir, count, size
from swiftcache_tier.donor.owner import leave_owners_tree, watch_owner
from swiftcache_tier.donor.plan import DonorPlan, plan_donor
from swiftcache_tier.donor.standalone import serve
from swiftcache_tier.extents import describe_device
from swiftcache_tier.log_format import JsonFormatter, json_wanted
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import count_extents, format_size

logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "donor",
        help="lend memory of this machine until interrupted",
        description="Lend memory to the receivers of this machine, until SIGTERM or SIGINT; then "
        "take it back and end. Time-outs and the extent size can be set by SWIFTCACHE_* variables.",
    )
    parser.add_argument(
        "--device",
        required=True,
        help="whose memory: 'host' for RAM, 'cuda:1' for a GPU's, which is taken at once",
        metavar="DEVICE",
    )
    parser.add_argument(
        "--size", required=True, type=size, metavar="SIZE", help="how much, as in 40GiB"
    )
    parser.add_argument("--name", help="under which it is found; default: device and process id")
    parser.add_argument(
        "--allow-user",
        action="append",
        default=[],
        metavar="NAME",
        help="let this user's processes borrow too; may be given several times",
    )
    parser.add_argument(
        "--extent-size", type=size, metavar="SIZE", help="unit in which it is lent; default: 64MiB"
    )
    parser.add_argument(
        "--owner-pid",
        type=count,
        metavar="PID",
        help="lend to this process alone, and end when it ends; goes on in the background, after "
        "a line with its process id",
    )
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    as_json = json_wanted()
    owner = None
    if arguments.owner_pid is not None:
        owner = watch_owner(arguments.owner_pid)
        leave_owners_tree()
        if owner.has_ended:
            return 0
    plan = plan_donor(
        device=arguments.device,
        size_bytes=arguments.size,
        name=arguments.name,
        runtime_dir=arguments.runtime_dir,
        extent_bytes=arguments.extent_size,
        allow_users=arguments.allow_user,
        owner=owner,
        settings=settings,
    )
    # An owner puts these lines into its own log, with its own times.
    when = "%(asctime)s " if plan.owner is None else ""
    logging.basicConfig(
        level=logging.INFO, format=f"{when}swiftcache donor {plan.paths.name}: %(message)s"
    )
    if as_json and plan.owner is None:
        logging.getLogger().handlers[0].setFormatter(JsonFormatter(donor=plan.paths.name))
    if plan.size_bytes < arguments.size:
        logger.info(
            "size %s is rounded down to %s of %s: %s",
            format_size(arguments.size),
            count_extents(plan.extents),
            format_size(plan.extent_bytes),
            format_size(plan.size_bytes),
        )
    if plan.others_allowed:
        _warn_if_shut(plan)
    return uvloop.run(serve(plan, settings, lambda: print(_ready_line(plan), flush=True)))


def _ready_line(plan: DonorPlan) -> str:
    arena = plan.arena
    return (
        f"swiftcache donor {plan.paths.name}: "
        f"{describe_device(arena.device, arena.uuid, arena.model)}, "
        f"{format_size(plan.size_bytes)} in {count_extents(plan.extents)} of "
        f"{format_size(plan.extent_bytes)}, {plan.paths.spec}"
    )


def _warn_if_shut(plan: DonorPlan) -> None:
    folder = plan.paths.door.parent
    mode = folder.stat().st_mode
    if not mode & 0o001:
        logger.warning(
            "users allowed by name cannot enter %s (mode %04o): run chmod 711 %s",
            folder,
            mode & 0o7777,
            folder,
        )
