"""`swiftcache top`: donors, links, blocks, GB/s and hits, while one watches."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from swiftcache_tier.cli.arguments import add_runtime_dir
from swiftcache_tier.cli.top_sample import take_sample
from swiftcache_tier.cli.top_tables import tables
from swiftcache_tier.control.runtime_dir import check_runtime_dir
from swiftcache_tier.settings import Settings

INTERVAL_S = 1.0
PIPE_COLUMNS = 200


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch donors, links, blocks, GB/s and hits",
        description="Show the donors of the runtime directory and the servers that borrow from "
        "them, anew every second until Ctrl-C. Into a file or a pipe it prints one table.",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="also show this server, as in http://10.0.0.7:8000; servers of this machine that "
        "listen on all addresses or on 127.0.0.1 are found by themselves; may be given several "
        "times",
    )
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    check_runtime_dir(arguments.runtime_dir)
    try:
        before = take_sample(arguments.runtime_dir, arguments.url, settings)
        time.sleep(INTERVAL_S)
        now = take_sample(arguments.runtime_dir, arguments.url, settings)
        if not sys.stdout.isatty():
            Console(width=PIPE_COLUMNS).print(tables(before, now))
            return 0
        with Live(tables(before, now), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(INTERVAL_S)
                before, now = now, take_sample(arguments.runtime_dir, arguments.url, settings)
                live.update(tables(before, now), refresh=True)
    except KeyboardInterrupt:
        return 0
