"""Rounds of random requests, each compared with what its prompt must be answered with."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields

from stress.client import Client, Lost

ABORTED_SHARE = 0.15
HUNG_UP_SHARE = 0.1
ABORT_WITHIN_S = 1.0


@dataclass
class Tally:
    """What became of requests. ``wrong`` and ``lost`` hold a line for each."""

    compared: int = 0
    aborted: int = 0
    hung_up: int = 0
    prompt_tokens: int = 0
    device_tokens: int = 0
    donor_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class Expected:
    """A prompt and the greedy answer to it."""

    prompt: list[int]
    output_ids: tuple[int, ...]


def first_answers(client: Client, prompts: Sequence[list[int]], new_tokens: int) -> list[Expected]:
    """Ask each prompt once, one after the other. Raises Lost."""
    return [
        Expected(
            prompt,
            client.generate(prompt, new_tokens, request_id=uuid.uuid4().hex).output_ids,
        )
        for prompt in prompts
    ]


def run_round(
    client: Client, expected: Sequence[Expected], *, seconds: float, parallel: int, seed: int
) -> Tally:
    """``parallel`` requests at a time for ``seconds``; returns when the last has ended."""
    end = time.monotonic() + seconds
    total = Tally()
    with ThreadPoolExecutor(parallel) as workers:
        tallies = [
            workers.submit(_ask_until, end, client, expected, random.Random(f"{seed}/{number}"))
            for number in range(parallel)
        ]
        for tally in tallies:
            total.add(tally.result())
    return total


def _ask_until(
    end: float, client: Client, expected: Sequence[Expected], rng: random.Random
) -> Tally:
    tally = Tally()
    while time.monotonic() < end:
        number = rng.randrange(len(expected))
        draw = rng.random()
        try:
            if draw < HUNG_UP_SHARE:
                _hang_up(client, expected[number], rng, tally)
            else:
                abort = draw < HUNG_UP_SHARE + ABORTED_SHARE
                _compare(client, number, expected[number], rng, abort, tally)
        except Lost as error:
            tally.lost.append(f"prompt {number}: {error}")
    return tally


def _hang_up(client: Client, expected: Expected, rng: random.Random, tally: Tally) -> None:
    events = rng.randint(1, len(expected.output_ids))
    client.generate_and_hang_up(expected.prompt, len(expected.output_ids), after_events=events)
    tally.hung_up += 1


def _compare(
    client: Client,
    number: int,
    expected: Expected,
    rng: random.Random,
    abort: bool,
    tally: Tally,
) -> None:
    wanted = expected.output_ids
    answer = client.generate(
        expected.prompt,
        len(wanted),
        request_id=uuid.uuid4().hex,
        abort_after_s=rng.uniform(0, ABORT_WITHIN_S) if abort else None,
    )
    if answer.aborted:
        tally.aborted += 1
    else:
        tally.compared += 1
        tally.prompt_tokens += len(expected.prompt)
        tally.device_tokens += answer.device_tokens
        tally.donor_tokens += answer.donor_tokens
    # What came of an aborted one must be right as well.
    if answer.output_ids != wanted[: len(answer.output_ids)]:
        at = next(
            i for i, (x, y) in enumerate(zip(answer.output_ids, wanted, strict=False)) if x != y
        )
        tally.wrong.append(
            f"prompt {number} ({len(expected.prompt)} tokens, {answer.device_tokens} from the "
            f"device, {answer.donor_tokens} from donors): token {at} is "
            f"{answer.output_ids[at]}, expected {wanted[at]}"
        )
