"""Conversations of random token ids, the same for the same seed on every machine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.base import Conversation, Turn, Workload


@dataclass(frozen=True)
class GeneratedShape:
    """Lengths in tokens. With ``range_ratio`` r below 1, each is drawn from r * length … length."""

    conversations: int = 256
    min_rounds: int = 5
    max_rounds: int = 5
    first_input_tokens: int = 512
    next_input_tokens: int = 512
    output_tokens: int = 64
    range_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise BenchmarkError(
                f"rounds from {self.min_rounds} to {self.max_rounds} are not a range: give "
                "--min-rounds at least 1 and at most --max-rounds"
            )
        lengths = (self.first_input_tokens, self.next_input_tokens, self.output_tokens)
        if self.conversations < 1 or min(lengths) < 1:
            raise BenchmarkError("numbers of clients and lengths in tokens must be at least 1")
        if not 0 < self.range_ratio <= 1:
            raise BenchmarkError(f"--range-ratio {self.range_ratio:g} is not in (0, 1]")


def generate_conversations(shape: GeneratedShape, ids: IdRange, seed: int) -> Workload:
    """``shape.conversations`` conversations; each depends on ``seed`` and its number alone."""
    return Workload(
        "generated",
        tuple(_conversation(shape, ids, seed, number) for number in range(shape.conversations)),
        {
            "request_length": shape.first_input_tokens,
            "sub_question_input_length": shape.next_input_tokens,
            "output_length": shape.output_tokens,
            "range_ratio": shape.range_ratio,
        },
    )


def generate_contexts(
    contexts: int, queries: int, shape: GeneratedShape, ids: IdRange, seed: int
) -> Workload:
    """``contexts`` long contexts with ``queries`` one-turn requests each, in shuffled order.

    A context is ``shape.first_input_tokens`` long and a query ``shape.next_input_tokens``; all
    requests of a context share it as their prefix.
    """
    order = np.random.default_rng([seed, 0]).permutation(contexts * queries)
    prefixes: dict[int, np.ndarray] = {}
    requests = []
    for number in order.tolist():
        context = number // queries
        rng = np.random.default_rng([seed, 1, number])
        shared = len(prefixes[context]) if context in prefixes else 0
        if not shared:
            of_context = np.random.default_rng([seed, 2, context])
            prefixes[context] = ids.random(of_context, shape.first_input_tokens)
        query = ids.random(rng, _length(rng, shape.next_input_tokens, shape.range_ratio))
        turn = Turn(
            np.concatenate([prefixes[context], query]),
            _length(rng, shape.output_tokens, shape.range_ratio),
            shared_tokens=shared,
        )
        requests.append(Conversation((turn,)))
    return Workload("generated contexts", tuple(requests), {"contexts": contexts})


def _conversation(shape: GeneratedShape, ids: IdRange, seed: int, number: int) -> Conversation:
    rng = np.random.default_rng([seed, number])
    rounds = int(rng.integers(shape.min_rounds, shape.max_rounds, endpoint=True))
    turns = []
    for turn in range(rounds):
        longest = shape.next_input_tokens if turn else shape.first_input_tokens
        input_tokens = _length(rng, longest, shape.range_ratio)
        output_tokens = _length(rng, shape.output_tokens, shape.range_ratio)
        turns.append(Turn(ids.random(rng, input_tokens), output_tokens))
    return Conversation(tuple(turns))


def _length(rng: np.random.Generator, longest: int, range_ratio: float) -> int:
    shortest = max(1, int(longest * range_ratio))
    return int(rng.integers(shortest, longest, endpoint=True))
