"""`swiftcache up`: start a set of servers and donors, and end them together."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import uvloop

from swiftcache_tier.cli.arguments import add_runtime_dir

_FAILED = 1


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "up",
        help="start the servers and donors of a file, and end them together",
        description="Start the servers and donors that FILE describes, donors before receivers, "
        "and forward their lines. Ctrl-C ends all of them, a second one at once; so does the end "
        "of any of them. SWIFTCACHE_MASTER_MODEL and SWIFTCACHE_WORKER_MODELS (with commas) "
        "replace the models of the receiver and the donor servers, and stand for a file where none "
        "is named; SWIFTCACHE_ROLE (master or worker) starts only those.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="YAML, as docs/cluster.md describes it"
    )
    parser.add_argument(
        "--server-args",
        default="",
        metavar="FLAGS",
        help="more flags for every server, as in --server-args='--trust-remote-code'",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the commands, start nothing"
    )
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # Imported here: the other subcommands have no use for them.
    from swiftcache_tier.cluster.commands import check_settings, waves
    from swiftcache_tier.cluster.config import add_server_args, read_cluster_file
    from swiftcache_tier.cluster.environment import apply_environment, cluster_of_environment
    from swiftcache_tier.cluster.memory import check_memory
    from swiftcache_tier.cluster.names import check_names
    from swiftcache_tier.cluster.ports import check_ports
    from swiftcache_tier.cluster.supervisor import supervise
    from swiftcache_tier.control.runtime_dir import check_runtime_dir, ensure_runtime_dir

    if arguments.file is None:
        cluster = cluster_of_environment(os.environ)
    else:
        cluster = apply_environment(read_cluster_file(arguments.file), os.environ)
    cluster, more_args = add_server_args(cluster, arguments.server_args)
    groups = waves(cluster, arguments.runtime_dir, more_args)
    members = [member for group in groups for member in group]
    check_settings(members)
    check_runtime_dir(arguments.runtime_dir)
    check_ports(cluster)
    check_names(cluster, arguments.runtime_dir)
    check_memory(cluster, arguments.runtime_dir)
    if arguments.dry_run:
        for member in members:
            print(member.line)
        return 0
    ensure_runtime_dir(arguments.runtime_dir)
    return 0 if uvloop.run(supervise(groups, cluster)) else _FAILED
