"""Arguments that several subcommands take."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from swiftcache_tier.control.runtime_dir import default_runtime_dir
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import parse_size

_PORT_MAX = 65535


def add_runtime_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runtime-dir",
        type=_folder,
        default=default_runtime_dir(),
        metavar="PATH",
        help="where donors put their sockets and are found; an empty one is refused; default: "
        "$SWIFTCACHE_RUNTIME_DIR, else a folder of your own (%(default)s)",
    )


def add_donor(parser: argparse.ArgumentParser) -> None:
    """The donor that a command is about, and where it is."""
    parser.add_argument(
        "name", metavar="NAME", help="the donor, by its name in `swiftcache status`"
    )
    add_runtime_dir(parser)


def _folder(text: str) -> Path:
    # Path("") is the current folder, and what an unset variable of a shell leaves.
    if not text:
        raise argparse.ArgumentTypeError("'': expected a folder; drop the flag for the default")
    return Path(text).absolute()


def size(text: str) -> int:
    """An argument that is a size. Raises what argparse turns into its one-line error."""
    try:
        return parse_size(text)
    except SwiftCacheError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """An argument that is a whole number, 1 or more."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def port(text: str) -> int:
    """An argument that is a TCP port to listen on."""
    if not (text.isdecimal() and int(text) <= _PORT_MAX):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a port, 1 to {_PORT_MAX}, or 0 for any that is free"
        )
    return int(text)


def seconds(text: str) -> float:
    """An argument that is a time to wait, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, 0 or more")
    return value
