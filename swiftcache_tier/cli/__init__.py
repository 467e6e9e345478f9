"""The `swiftcache` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from swiftcache_tier.cli import bench, donor, drain, exporter, limit, plan, status, top, up
from swiftcache_tier.errors import SwiftCacheError

# Each module has `add_parser(subparsers)`, which sets the default `run` to a function that takes
# the parsed arguments and returns the exit status.
_SUBCOMMANDS = (donor, status, top, limit, drain, plan, up, bench, exporter)
_USAGE_ERROR = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong; subcommands have parsers of this class too."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.splitlines())
        self.exit(_USAGE_ERROR, f"swiftcache: {line}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `swiftcache` with `argv` (default: the process's own). Returns the exit status."""
    parser = _Parser(
        prog="swiftcache",
        description="Lend idle memory of this machine to SGLang servers that run on it.",
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:  # said by the parser whose --help lists what is known
        subparsers.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        status_code: int = arguments.run(arguments)
    except SwiftCacheError as error:
        print(f"swiftcache: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except KeyboardInterrupt:
        return _INTERRUPTED
    return status_code
