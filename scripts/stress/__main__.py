"""The command line of the stress: see the package. Exit code 1 if something was wrong."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from demo.ending import clean_ending
from stress.client import Client
from stress.run import Outcome, Plan, Unfit, stress
from support.donors import Donor
from support.server import Server
from support.tiny_model import build_tiny_model

EXIT_UNFIT = 2
REQUEST_TIMEOUT_S = 120.0
LISTED_PROBLEMS = 20

# Fewer tokens on the device, and fewer on donors, than the prompts have: both tiers evict.
SERVER_FLAGS = (
    *("--max-total-tokens", "1024", "--page-size", "16", "--chunked-prefill-size", "128"),
    *("--random-seed", "1", "--swiftcache-donors"),
)
DONOR_SIZE = {"size": "1MiB", "extent_size": "128KiB"}

HELP = {
    "seconds": "how long to go on after the first answers",
    "round_s": "seconds between two looks at the server, every third after a flush",
    "parallel": "requests at a time",
    "prompts": "different prompts",
    "prompt_tokens": "tokens of the shortest prompts; the longest have twice as many",
    "new_tokens": "tokens of each answer",
    "flips_per_s": "bits to flip in the memory of host donors each second; 0 leaves it alone",
    "seed": "of the prompts, the order and the flips",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stress", description="Stress a server and compare every token of every answer."
    )
    parser.add_argument("--url", help="of a server that runs; without it, one is started")
    for each in fields(Plan):
        flag = "--" + each.name.replace("_", "-")
        note = f"{HELP[each.name]} (default: {each.default:g})"
        parser.add_argument(flag, type=type(each.default), default=each.default, help=note)
    parser.add_argument("server_flags", nargs="*", help="after --: for the server it starts")
    given = vars(parser.parse_args(arguments))
    url, server_flags = given.pop("url"), given.pop("server_flags")
    plan = Plan(**given)
    if url is not None and server_flags:
        parser.error("flags for a server that is already running: drop them, or --url")
    if url is not None:
        return _run(url, plan)
    if plan.flips_per_s:
        server_flags.append("--swiftcache-verify")
    with clean_ending(), _own_server(server_flags) as own_url:
        return _run(own_url, plan)


def _run(url: str, plan: Plan) -> int:
    try:
        outcome = stress(Client(url, REQUEST_TIMEOUT_S), plan, _say)
    except Unfit as error:
        print(f"stress: {error}", file=sys.stderr)
        return EXIT_UNFIT
    _print(outcome)
    return 1 if outcome.problems else 0


@contextlib.contextmanager
def _own_server(flags: Sequence[str]) -> Iterator[str]:
    """A tiny model on the CPU engine and two small donors; ``flags`` come last."""
    with tempfile.TemporaryDirectory(prefix="swiftcache-stress-") as name:
        scratch = Path(name)
        model = build_tiny_model(scratch / "model")
        runtime_dir = scratch / "rt"
        ours = (*SERVER_FLAGS, "--swiftcache-runtime-dir", str(runtime_dir), *flags)
        with (
            Donor(runtime_dir, "ada", **DONOR_SIZE),
            Donor(runtime_dir, "bob", **DONOR_SIZE),
            Server(model, *ours, tmp_path=scratch) as server,
        ):
            _say(f"a server with a tiny model is up at {server.url}")
            yield server.url


def _say(line: str) -> None:
    print(line, flush=True)


def _print(outcome: Outcome) -> None:
    tally = outcome.tally
    computed = tally.prompt_tokens - tally.device_tokens - tally.donor_tokens
    rows = [
        ("time", f"{outcome.seconds:.0f} s"),
        ("answers compared", tally.compared),
        ("aborted / hung up", f"{tally.aborted} / {tally.hung_up}"),
        ("prompt tokens from the device", tally.device_tokens),
        ("prompt tokens from donors", tally.donor_tokens),
        ("prompt tokens computed", computed),
        ("bits flipped in donor memory", outcome.flips),
        ("corrupt blocks found", outcome.corrupt_blocks),
        ("flushes", outcome.flushes),
        ("wrong answers", len(tally.wrong)),
        ("lost requests", len(tally.lost)),
    ]
    print()
    for what, value in rows:
        print(f"{what:32}{value}")
    for problem in outcome.problems[:LISTED_PROBLEMS]:
        print(f"PROBLEM: {problem}")
    if len(outcome.problems) > LISTED_PROBLEMS:
        print(f"PROBLEM: and {len(outcome.problems) - LISTED_PROBLEMS} more")
    print("failed" if outcome.problems else "passed", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
