"""Prompts around and far beyond a pool's regular slots: alone, in turns, and sixteen at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from support.server import Server

FACTORS = (0.5, 1.0, 1.5, 4.0, 8.0)
TURNS = 3
OUTPUT_TOKENS = 12
NEW_TOKENS = 7
AT_ONCE = 16
SHARED_FACTOR, OWN_TOKENS = 1.2, 100


class Answer(NamedTuple):
    """What was said to one prompt, and how likely each word of it was."""

    what: str
    output_ids: list[int]
    logprobs: list[float]


def hold(
    server: Server,
    regular_tokens: int,
    *,
    factors: Sequence[float] = FACTORS,
    at_once: int = AT_ONCE,
    seed: int = 5,
) -> list[Answer]:
    """Conversations that start with each of ``factors`` times the regular slots, then requests that
    share a prefix, twice; the same questions for every server."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(count)]

    answers = []
    for factor in factors:
        history = ids(int(factor * regular_tokens))
        for turn in range(TURNS):
            [answer] = ask(server, [history], f"{factor:g} R, turn {turn}")
            answers.append(answer)
            history += answer.output_ids + ids(NEW_TOKENS)
    shared = ids(int(SHARED_FACTOR * regular_tokens))
    for turn in range(2 if at_once else 0):
        prompts = [shared + ids(OWN_TOKENS) for _ in range(at_once)]
        answers += ask(server, prompts, f"{at_once} at once, turn {turn}")
    return answers


def ask(server: Server, prompts: Sequence[Sequence[int]], what: str) -> list[Answer]:
    answers = server.generate(prompts, OUTPUT_TOKENS, return_logprob=True)
    found = []
    for answer in answers:
        logprobs = answer["meta_info"]["output_token_logprobs"]
        found.append(Answer(what, answer["output_ids"], [item[0] for item in logprobs]))
    return found


def assert_same(found: Sequence[Answer], expected: Sequence[Answer], tolerance: float) -> None:
    """The same tokens; log-probabilities within ``tolerance`` (batches may be cut differently)."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.output_ids == theirs.output_ids, mine.what
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert abs(a - b) <= tolerance, (mine.what, a, b)
