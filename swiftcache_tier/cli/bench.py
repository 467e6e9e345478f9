"""`swiftcache bench`: borrow from the donors that are there, time it, and give it back."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from rich.console import Console
from rich.table import Table

from swiftcache_tier.cli.arguments import add_runtime_dir, size
from swiftcache_tier.cli.status import DonorReport, ask_all
from swiftcache_tier.control.runtime_dir import check_runtime_dir
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import DonorSpec

if TYPE_CHECKING:
    import numpy as np

    from swiftcache_tier.receiver import DonorTier

BLOCK_BYTES = 1 << 20
PIPE_COLUMNS = 160
SERVING = "serving"


class Speeds(NamedTuple):
    """GB/s (1e9 bytes) of copies from and to a donor; None where they were not measured."""

    read: float | None
    write: float | None


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time borrowing from the donors, and copies from and to their memory",
        description="Borrow from every donor of the runtime directory as a server would, time how "
        "long that takes and how fast their memory is read and written, check that it holds what "
        "was written, and give it back. Donors share out among all receivers, so this takes memory "
        "from servers that borrow: run it before they start.",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="what reads the memory: cpu (default), or cuda:N, which measures reads alone",
    )
    parser.add_argument(
        "--size",
        type=size,
        default=256 << 20,
        metavar="SIZE",
        help="how much to copy from and to each donor, at most (default: 256MiB)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.size < BLOCK_BYTES:
        raise SwiftCacheError(
            f"--size {format_size(arguments.size)} is less than one block: expected "
            f"{format_size(BLOCK_BYTES)} or more"
        )
    # other commands start without numpy and its threads
    from swiftcache_tier.receiver import DonorTier

    settings = Settings.from_env()
    check_runtime_dir(arguments.runtime_dir)
    donors = [each.paths for each in _that_lend(ask_all(arguments.runtime_dir, settings))]
    if not donors:
        raise SwiftCacheError(
            f"no donor that lends in {arguments.runtime_dir}: start one, as in swiftcache donor "
            f"--device host --size 8GiB"
        )
    began_s = time.monotonic()
    tier = DonorTier(
        [DonorSpec.parse(paths.spec) for paths in donors],
        BLOCK_BYTES,
        settings=settings,
        runtime_dir=arguments.runtime_dir,
        receiver_name=f"bench {os.getpid()}",
        device=arguments.device,
    )
    tier.start()
    try:
        joined_s = time.monotonic() - began_s
        speeds = _measure(tier, arguments.size) if arguments.device == "cpu" else {}
        status = tier.status()
    finally:
        began_s = time.monotonic()
        tier.close()
    report = {
        "device": arguments.device,
        "join_ms": round(joined_s * 1e3, 3),
        "give_back_ms": round((time.monotonic() - began_s) * 1e3, 3),
        "donors": [
            _row(donor, speeds.get(donor["name"]))
            for donor in sorted(status["donors"], key=lambda donor: donor["name"])
        ],
    }
    if arguments.json:
        print(orjson.dumps(report, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(report)
    return 0


def _that_lend(reports: Sequence[DonorReport]) -> list[DonorReport]:
    """Those that are ready; the others are named on stderr."""
    for report in reports:
        if report.state != SERVING:
            print(f"swiftcache: left out: {report.paths.name} is {report.state}", file=sys.stderr)
    return [report for report in reports if report.state == SERVING]


def _measure(tier: DonorTier, size_bytes: int) -> dict[str, Speeds]:
    """Copies by this process, donor by donor. Raises SwiftCacheError for memory that forgets."""
    import numpy as np

    ids = tier.alloc(tier.free_blocks)
    assert ids is not None
    names, owners = tier.donor_names(), tier.donor_of(ids)
    try:
        return {
            names[key]: _copy(tier, ids[owners == key][: size_bytes // BLOCK_BYTES], name)
            for key, name in names.items()
            if np.any(owners == key)
        }
    finally:
        tier.free(ids)


def _copy(tier: DonorTier, ids: np.ndarray, name: str) -> Speeds:
    """Write the blocks twice, since the first time takes their RAM, then read and compare."""
    import numpy as np

    wanted = np.random.default_rng(len(ids)).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    found = np.empty_like(wanted)
    addresses = tier.addresses(ids).tolist()
    gigabytes = len(ids) * BLOCK_BYTES / 1e9
    for _ in range(2):
        began_s = time.perf_counter()
        for address in addresses:
            ctypes.memmove(address, wanted.ctypes.data, BLOCK_BYTES)
        write_s = time.perf_counter() - began_s
    read_s = 0.0
    for address in addresses:
        began_s = time.perf_counter()
        ctypes.memmove(found.ctypes.data, address, BLOCK_BYTES)
        read_s += time.perf_counter() - began_s
        if not np.array_equal(found, wanted):
            raise SwiftCacheError(
                f"memory of donor {name} does not hold what was written to it: do not use it; "
                f"check the machine's memory"
            )
    return Speeds(gigabytes / read_s, gigabytes / write_s)


def _row(donor: dict[str, Any], speeds: Speeds | None) -> dict[str, Any]:
    read = donor["link_details"]["measured_gb_per_s"] if speeds is None else speeds.read
    write = None if speeds is None else speeds.write
    return {
        "name": donor["name"],
        "device": donor["device"],
        "link": donor["link"],
        "bytes": donor["bytes"],
        "read_gb_per_s": read and round(read, 1),
        "write_gb_per_s": write and round(write, 1),
    }


def _print(report: dict[str, Any]) -> None:
    table = Table("DONOR", "DEVICE", "LINK", "BORROWED", "READ GB/s", "WRITE GB/s", box=None)
    for row in report["donors"]:
        speeds = [row["read_gb_per_s"], row["write_gb_per_s"]]
        table.add_row(
            row["name"],
            row["device"],
            row["link"],
            format_size(row["bytes"]),
            *("-" if speed is None else f"{speed:.1f}" for speed in speeds),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    console.print(table)
    console.print(
        f"borrowed by {report['device']} in {report['join_ms']:.1f} ms, given back in "
        f"{report['give_back_ms']:.1f} ms"
    )
