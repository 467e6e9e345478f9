"""The command line of the fuzzing: see the package. Exit code 1 if something was wrong."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from demo.ending import clean_ending
from fuzz.attack import ATTACKS
from fuzz.bystander import Bystander
from fuzz.health import holdings, leak
from support.donors import Donor
from support.processes import wait_until
from swiftcache_tier.control.messages import PROTOCOL, LimitRequest
from swiftcache_tier.control.query import ask, query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings

PATTERN = 0x5A
SETTLE_DEADLINE_S = 60.0
# An attack may find its victim slow; what it must not find is one that is stuck.
ATTACK_DEADLINE_S = 3600.0
# The share of the inputs that each attack sends.
SHARES = {"door": 0.3, "control": 0.5, "receiver": 0.2}
ENV = {
    "SWIFTCACHE_DISCOVERY_INTERVAL_S": "0.05",
    "SWIFTCACHE_HANDSHAKE_TIMEOUT_S": "2",
    "SWIFTCACHE_OFFER_TIMEOUT_S": "2",
    "SWIFTCACHE_JOIN_TIMEOUT_S": "30",
    "SWIFTCACHE_ADDRESS_SPACE_BYTES": "1GiB",
}


class Outcome(NamedTuple):
    """One attack: how many inputs, for how long, and a line for each thing that must not be."""

    kind: str
    inputs: int
    seconds: float
    slowest_status_s: float
    problems: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fuzz", description="Throw hostile input at donors and receivers."
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="in all (default: 100000)")
    parser.add_argument("--seed", default="1", help="of the inputs (default: 1)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS)
    given = parser.parse_args(arguments)
    total = sum(SHARES[kind] for kind in given.attacks)
    outcomes = []
    with clean_ending():
        for kind in given.attacks:
            inputs = round(given.inputs * SHARES[kind] / total)
            outcomes.append(run(kind, inputs, given.seed))
            _print(outcomes[-1])
    failed = any(outcome.problems for outcome in outcomes)
    print(f"{sum(o.inputs for o in outcomes)} inputs: {'failed' if failed else 'passed'}")
    return 1 if failed else 0


def run(kind: str, inputs: int, seed: str) -> Outcome:
    """Attack fresh victims."""
    with tempfile.TemporaryDirectory(prefix="sc-fuzz-") as scratch:
        runtime_dir = Path(scratch) / "rt"
        with (
            Donor(runtime_dir, "victim", size="1MiB", extent_size="128KiB", **ENV) as donor,
            Bystander(runtime_dir, "bystander", env=ENV) as bystander,
        ):
            return _attack(kind, inputs, seed, runtime_dir, donor, bystander)


def _attack(
    kind: str, inputs: int, seed: str, runtime_dir: Path, donor: Donor, bystander: Bystander
) -> Outcome:
    bystander("fill", PATTERN)
    victim_pid = bystander.process.pid if kind == "receiver" else donor.process.pid
    target = "hostile" if kind == "receiver" else donor.name
    before = holdings(victim_pid)
    began_s = time.monotonic()
    attacker = subprocess.Popen(
        [sys.executable, "-m", "fuzz.attack", kind, str(runtime_dir / target), str(inputs), seed],
        env={**os.environ, **ENV, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    problems: list[str] = []
    slowest_s = 0.0
    try:
        while attacker.poll() is None:
            if time.monotonic() - began_s > ATTACK_DEADLINE_S:
                problems.append(f"the attack has not ended for {ATTACK_DEADLINE_S:g} s")
                break
            slowest_s = max(slowest_s, _ask_victims(donor, bystander, problems))
            if problems:
                break
            time.sleep(0.5)
    finally:
        attacker.kill()
    said, complaint = attacker.communicate()
    sent = int(said) if said.strip() else 0
    if not sent and not problems:
        problems.append(f"the attack broke off: {complaint.strip().splitlines()[-1:]}")
    seconds = time.monotonic() - began_s
    if not problems:
        problems += _look_after(donor, bystander)
        if leaked := leak(victim_pid, before):
            problems.append(f"the victim, process {victim_pid}, {leaked}")
    return Outcome(kind, sent, seconds, slowest_s, problems)


def _ask_victims(donor: Donor, bystander: Bystander, problems: list[str]) -> float:
    """Both answer, and what is kept with the donor is as it was. Returns the time it took."""
    asked_s = time.monotonic()
    settings = Settings(status_timeout_s=SETTLE_DEADLINE_S)
    try:
        query_status(donor_paths(donor.runtime_dir, donor.name), settings)
        seen = bystander("bytes_seen")
        if seen not in ([PATTERN], []):
            problems.append(f"bytes of the bystander have changed: {seen}")
    except EOFError as error:
        problems.append(str(error))
    except SwiftCacheError as error:
        # Refused for the crowd at the door is an answer too: it is asked again.
        if donor.process.poll() is not None:
            problems.append(f"the donor ended with {donor.process.returncode}: {error}")
    return time.monotonic() - asked_s


def _look_after(donor: Donor, bystander: Bystander) -> list[str]:
    """With the attacker gone, all memory is the bystander's again, and clean."""
    settings = Settings(status_timeout_s=SETTLE_DEADLINE_S)
    paths = donor_paths(donor.runtime_dir, donor.name)

    def all_back() -> bool:
        reply = query_status(paths, settings)
        return len(reply.receivers) == 1 and reply.extents["lent"] == sum(reply.extents.values())

    try:
        # Whoever runs as the donor's user may limit and drain it, and has.
        for each in (False, True):
            ask(paths, LimitRequest(PROTOCOL, bytes=None, each=each), settings)
        wait_until(all_back, SETTLE_DEADLINE_S, "the bystander holds all memory again")
        fresh = bystander("take")
    except (AssertionError, SwiftCacheError, EOFError) as error:
        return [str(error)]
    return [] if set(fresh) <= {0, PATTERN} else [f"memory came back unclean: {fresh}"]


def _print(outcome: Outcome) -> None:
    rate = outcome.inputs / outcome.seconds
    print(
        f"{outcome.kind:9}{outcome.inputs:8} inputs in {outcome.seconds:6.1f} s ({rate:.0f}/s), "
        f"slowest answer to others {outcome.slowest_status_s:.2f} s",
        flush=True,
    )
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
