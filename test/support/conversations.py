"""Interleaved conversations: the load that a prefix cache is for."""

from __future__ import annotations

import random
from typing import NamedTuple

from support.server import Server

CONVERSATIONS = 5
TURNS = 4
FIRST_TOKENS = 150
NEW_TOKENS = 23
OUTPUT_TOKENS = 8


class Turn(NamedTuple):
    """One answered request."""

    prompt_tokens: int
    output_ids: list[int]
    device_tokens: int
    donor_tokens: int


def hold(server: Server, *, seed: int = 5, at_once: bool = False) -> list[Turn]:
    """Five conversations of four turns, turn by turn; each turn carries the whole history.

    All together have more tokens than the device pools of these tests, so later turns find their
    history evicted. ``at_once`` sends the requests of a turn as one batch.
    """
    rng = random.Random(seed)
    histories = [
        [rng.randrange(10, 500) for _ in range(FIRST_TOKENS)] for _ in range(CONVERSATIONS)
    ]
    turns = []
    for _ in range(TURNS):
        if at_once:
            answers = server.generate(histories, OUTPUT_TOKENS)
        else:
            answers = [server.generate(history, OUTPUT_TOKENS)[0] for history in histories]
        for history, answer in zip(histories, answers, strict=True):
            details = answer["meta_info"].get("cached_tokens_details") or {}
            output = list(answer["output_ids"])
            turns.append(
                Turn(len(history), output, details.get("device", 0), details.get("host", 0))
            )
            history += output + [rng.randrange(10, 500) for _ in range(NEW_TOKENS)]
    return turns


def outputs(turns: list[Turn]) -> list[list[int]]:
    return [turn.output_ids for turn in turns]


def donor_tokens(turns: list[Turn]) -> int:
    return sum(turn.donor_tokens for turn in turns)
