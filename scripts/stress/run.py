"""One run against a server that is up: first answers, rounds, and what they showed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stress.client import Client, Lost
from stress.donor_memory import Flipper, extents_of
from stress.load import Expected, Tally, first_answers, run_round
from stress.prompts import make_prompts

# One round in so many is followed by a flush, so that both an old and an empty cache are used.
ROUNDS_PER_FLUSH = 3


class Unfit(Exception):
    """A server that such a run would show nothing about; one line says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """What to do, as the command line names it."""

    seconds: float = 300.0
    round_s: float = 10.0
    parallel: int = 4
    prompts: int = 24
    prompt_tokens: int = 100
    new_tokens: int = 16
    flips_per_s: float = 20.0
    seed: int = 1


@dataclass
class Outcome:
    """What a run showed; ``problems`` holds a line for each thing that must not be."""

    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)
    flips: int = 0
    flushes: int = 0
    corrupt_blocks: int = 0
    problems: list[str] = field(default_factory=list)


def stress(client: Client, plan: Plan, say: Callable[[str], None]) -> Outcome:
    """Run the plan; `say` is told how it goes.

    Raises Unfit before anything is disturbed. Everything else ends in the outcome.
    """
    extents = _look_at(client, plan)
    outcome = Outcome()
    began_s = time.monotonic()
    try:
        corrupt_before = client.tier()["corrupt_blocks"]
        client.flush()
        prompts = make_prompts(plan.prompts, plan.prompt_tokens, plan.seed)
        expected = first_answers(client, prompts, plan.new_tokens)
        say(f"first answers to {len(expected)} prompts after {time.monotonic() - began_s:.1f} s")
        began_s = time.monotonic()
        _rounds(client, plan, expected, extents, outcome, say)
        outcome.corrupt_blocks = client.tier()["corrupt_blocks"] - corrupt_before
    except Lost as error:
        outcome.problems.append(f"the server does not serve any more: {error}")
    outcome.seconds = time.monotonic() - began_s
    outcome.problems += _problems(outcome, plan)
    return outcome


def _look_at(client: Client, plan: Plan) -> list[Path]:
    """The extents to flip bits in. Raises Unfit."""
    try:
        info: dict[str, Any] = client.server_info()
    except Lost as error:
        raise Unfit(f"no server at {client.url}: {error}") from error
    tier = info["internal_states"][0].get("swiftcache")
    if tier is None:
        raise Unfit("the server has no donors: start it with --swiftcache-donors")
    pool_tokens = info["max_total_num_tokens"]
    tokens = _distinct_tokens(make_prompts(plan.prompts, plan.prompt_tokens, plan.seed))
    if tokens < 2 * pool_tokens:
        raise Unfit(
            f"the prompts have {tokens} tokens and the device pool {pool_tokens}, so little would "
            "be restored: start the server with a smaller --max-total-tokens, or ask for more "
            "--prompts or --prompt-tokens"
        )
    if not plan.flips_per_s:
        return []
    if not info["swiftcache_verify"]:
        raise Unfit(
            "without --swiftcache-verify the server cannot tell flipped bits: start it with that "
            "flag, or give --flips-per-s 0"
        )
    extents = extents_of(tier["donors"])
    if not extents:
        raise Unfit(
            "no donor's memory can be written from here: use donors of host memory, as this user, "
            "or give --flips-per-s 0"
        )
    return extents


def _rounds(
    client: Client,
    plan: Plan,
    expected: list[Expected],
    extents: list[Path],
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    end = time.monotonic() + plan.seconds
    number = 0
    while (left_s := end - time.monotonic()) > 0:
        number += 1
        flipper = None
        with contextlib.ExitStack() as while_running:
            if extents:
                flipper = Flipper(extents, plan.flips_per_s, seed=plan.seed + number)
                while_running.enter_context(flipper)
            tally = run_round(
                client,
                expected,
                seconds=min(plan.round_s, left_s),
                parallel=plan.parallel,
                seed=plan.seed + number,
            )
        outcome.tally.add(tally)
        outcome.flips += 0 if flipper is None else flipper.flips
        say(
            f"{plan.seconds - max(0.0, end - time.monotonic()):.0f} s: "
            f"{outcome.tally.compared} compared, {outcome.tally.donor_tokens} tokens from donors, "
            f"{outcome.flips} bits flipped, {client.tier()['corrupt_blocks']} corrupt blocks "
            f"found, {len(outcome.tally.wrong)} wrong, {len(outcome.tally.lost)} lost"
        )
        if number % ROUNDS_PER_FLUSH == 0:
            _flush(client, outcome)
    _flush(client, outcome)


def _flush(client: Client, outcome: Outcome) -> None:
    """Nothing is running, so nothing may be left afterwards."""
    client.flush()
    outcome.flushes += 1
    blocks = client.tier()["blocks"]
    if blocks["used"] or blocks["retiring"]:
        outcome.problems.append(f"donor blocks are still in use after a flush: {blocks}")


def _problems(outcome: Outcome, plan: Plan) -> list[str]:
    tally = outcome.tally
    found = [f"wrong token: {line}" for line in tally.wrong]
    found += [f"lost request: {line}" for line in tally.lost]
    if not tally.donor_tokens:
        found.append("nothing was restored from donors, so the run shows nothing")
    if plan.flips_per_s and not outcome.corrupt_blocks:
        found.append("no restore met a flipped bit, so the run shows nothing about them")
    return found


def _distinct_tokens(prompts: list[list[int]]) -> int:
    """How many tokens a prefix tree of the prompts holds."""
    prefixes = set()
    for prompt in prompts:
        prefix = 0
        for token in prompt:
            prefix = hash((prefix, token))
            prefixes.add(prefix)
    return len(prefixes)
