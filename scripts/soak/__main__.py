"""The command line of the soak: see the package. Exit code 1 if something was wrong."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from demo.ending import clean_ending
from faults.stage import SERVER_ENV, START_DEADLINE_S, scheduler_of
from soak.books import Books, Clock
from soak.coming_and_going import ComingAndGoing
from stress.client import Client, Lost
from stress.load import Expected, Tally, first_answers, run_round
from stress.prompts import make_prompts
from support.donors import Donor
from support.processes import wait_until
from support.server import Server
from support.tiny_model import build_tiny_model
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import list_donors
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings

REQUEST_TIMEOUT_S = 300.0
SETTLE_DEADLINE_S = 120.0
PARALLEL = 4
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 24, 100, 16
SAY_EVERY_S = 30.0
CALM_ROUNDS = 2
"""Times that all prompts are asked in a calm round."""
SLOWER_MAX = 0.05
SERVER_FLAGS = (
    *("--max-total-tokens", "1024", "--page-size", "16", "--chunked-prefill-size", "128"),
    *("--random-seed", "1", "--swiftcache-donors"),
)
DONOR = {"size": "1MiB", "extent_size": "128KiB"}
EXTENTS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="soak", description="Hours of conversations and faults.")
    parser.add_argument("--seconds", type=float, default=3600.0, help="(default: 3600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only-report-cost",
        action="store_true",
        help="do not fail if a calm round costs the server over 5 %% more at the end: for runs too "
        "short, or on machines too busy, to tell",
    )
    given = parser.parse_args(arguments)
    with clean_ending(), tempfile.TemporaryDirectory(prefix="sc-soak-") as name:
        scratch = Path(name)
        model = build_tiny_model(scratch / "model")
        runtime_dir = scratch / "rt"
        guests = ComingAndGoing(runtime_dir, ["bob", "cid"], given.seed, **DONOR)
        with (
            Donor(runtime_dir, "ada", **DONOR) as host,
            Server(
                model,
                *SERVER_FLAGS,
                *("--swiftcache-runtime-dir", str(runtime_dir)),
                tmp_path=scratch,
                env=SERVER_ENV,
                deadline_s=START_DEADLINE_S,
            ) as server,
        ):
            try:
                guests.start_all()
                problems = _soak(server, host, guests, given.seconds, given.seed, given)
            finally:
                guests.end_all()
    for problem in problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    print("failed" if problems else "passed", flush=True)
    return 1 if problems else 0


def _soak(
    server: Server,
    host: Donor,
    guests: ComingAndGoing,
    seconds: float,
    seed: int,
    given: argparse.Namespace,
) -> list[str]:
    client = Client(server.url, REQUEST_TIMEOUT_S)
    scheduler = scheduler_of(server)
    processes = {
        "server": server.process.pid,
        "scheduler": scheduler.pid,
        "donor": host.process.pid,
    }
    prompts = make_prompts(PROMPTS, PROMPT_TOKENS, seed)
    try:
        expected = first_answers(client, prompts, NEW_TOKENS)
        first = _calm_round(client, expected, scheduler.pid)
        books = Books(
            client, lambda: _extents(guests, host.runtime_dir), EXTENTS, lambda: processes
        )
        total = Tally()
        with books, guests:
            _rounds(client, expected, seconds, seed, total)
        last = _calm_round(client, expected, scheduler.pid)
        left = _left_over(client)
    except (Lost, AssertionError) as error:
        return [f"the server does not serve any more: {error}", *_log_tail(server)]
    _print(total, guests, books, first, last)
    slower = last.cpu_s / first.cpu_s - 1
    return [
        *(f"wrong: {line}" for line in total.wrong),
        *(f"lost: {line}" for line in total.lost),
        *books.problems,
        *books.grown(),
        *left,
        *([guests.problem] if guests.problem else []),
        *([] if total.donor_tokens else ["nothing was restored from donors"]),
        *(
            [f"a calm round costs the scheduler {slower:.1%} more CPU time than at the start"]
            if slower > SLOWER_MAX and not given.only_report_cost
            else []
        ),
    ]


def _rounds(
    client: Client, expected: list[Expected], seconds: float, seed: int, total: Tally
) -> None:
    end = time.monotonic() + seconds
    number = 0
    while (left_s := end - time.monotonic()) > 0:
        number += 1
        total.add(
            run_round(
                client,
                expected,
                seconds=min(SAY_EVERY_S, left_s),
                parallel=PARALLEL,
                seed=seed + number,
            )
        )
        print(
            f"{seconds - max(0.0, end - time.monotonic()):.0f} s: {total.compared} compared, "
            f"{total.aborted} aborted, {total.hung_up} hung up, {total.donor_tokens} tokens from "
            f"donors, {len(total.wrong)} wrong, {len(total.lost)} lost",
            flush=True,
        )


def _calm_round(client: Client, expected: list[Expected], pid: int) -> Clock:
    """All prompts, several times, one after the other, with all donors there. Raises Lost."""
    _wait_for_donors(client)
    client.flush()
    first_answers(client, [each.prompt for each in expected], NEW_TOKENS)
    with Clock(pid) as clock:
        for _ in range(CALM_ROUNDS):
            first_answers(client, [each.prompt for each in expected], NEW_TOKENS)
    return clock


def _wait_for_donors(client: Client) -> None:
    def whole() -> bool:
        donors = client.tier()["donors"]
        return len(donors) == 3 and all(d["extents"]["lent"] == EXTENTS for d in donors)

    wait_until(whole, SETTLE_DEADLINE_S, "all donors lend all they have")


def _left_over(client: Client) -> list[str]:
    client.flush()
    blocks = client.tier()["blocks"]
    if blocks["free"] == blocks["total"]:
        return []
    return [f"donor blocks are in use after a flush: {blocks}"]


def _extents(guests: ComingAndGoing, runtime_dir: Path) -> list[tuple[str, Mapping[str, int]]]:
    found: list[tuple[str, Mapping[str, int]]] = []
    for paths in list_donors(runtime_dir):
        try:
            found.append((paths.name, query_status(paths, Settings(status_timeout_s=0.5)).extents))
        except SwiftCacheError:
            continue  # it hangs, or has ended
    return found


def _log_tail(server: Server) -> list[str]:
    return server.log().splitlines()[-5:]


def _print(total: Tally, guests: ComingAndGoing, books: Books, first: Clock, last: Clock) -> None:
    events = ", ".join(f"{count} {what}" for what, count in sorted(guests.events.items()))
    rows = [
        ("answers compared", total.compared),
        ("aborted / hung up", f"{total.aborted} / {total.hung_up}"),
        ("prompt tokens from device / donors", f"{total.device_tokens} / {total.donor_tokens}"),
        ("wrong / lost", f"{len(total.wrong)} / {len(total.lost)}"),
        ("donors", events),
        ("checks of the books", books.checks),
        ("a calm round, first", f"{first.cpu_s:.2f} s of CPU, {first.wall_s:.2f} s"),
        ("a calm round, last", f"{last.cpu_s:.2f} s of CPU, {last.wall_s:.2f} s"),
    ]
    for name, samples in books.samples.items():
        quarter = max(1, len(samples) // 4)
        early, late = samples[min(quarter, len(samples) - 1)], samples[-1]
        memory = f"{early.rss_bytes >> 20} -> {late.rss_bytes >> 20} MiB"
        rows.append((f"{name}: memory, descriptors", f"{memory}, {early.files} -> {late.files}"))
    for what, value in rows:
        print(f"{what:38}{value}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
