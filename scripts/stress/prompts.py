"""Prompts that share prefixes, part anywhere and continue each other."""

from __future__ import annotations

import random

FAMILIES = 4
# Ids that every vocabulary has.
FIRST_ID, LAST_ID = 10, 500


def make_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of ``tokens`` to twice as many ids, from four families.

    A prompt follows another one of its family for a random part of it, then goes its own way.
    """
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        shared: list[int] = []
        if number >= FAMILIES:
            parent = prompts[rng.choice(range(number % FAMILIES, number, FAMILIES))]
            shared = parent[: rng.randint(0, len(parent))]
        length = max(len(shared) + 1, rng.randint(tokens, 2 * tokens))
        own = [rng.randint(FIRST_ID, LAST_ID) for _ in range(length - len(shared))]
        prompts.append(shared + own)
    return prompts
