"""The contract of a workload: conversations, each a fixed sequence of turns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from swiftcache_bench.tokens import IdRange, TokenIds


@dataclass(frozen=True, eq=False)
class Turn:
    """What a user adds to a conversation, and how long the answer to it is.

    The prompt of a turn is the whole conversation before it, the server's own answers included,
    followed by ``input_ids`` (at least one). ``shared_tokens`` says how many of the first of
    ``input_ids`` an earlier request of the workload sent as the start of its prompt (first turns
    only). ``arrival_s`` is the time in the data set, in seconds from its start, where it has one.
    """

    input_ids: TokenIds
    output_tokens: int
    shared_tokens: int = 0
    arrival_s: float | None = None


@dataclass(frozen=True, eq=False)
class Conversation:
    """Turns that are sent one after the other, each once the one before has been answered."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, eq=False)
class Workload:
    """Everything one run sends. ``notes`` go into reports: how it came about, what was left out."""

    name: str
    conversations: tuple[Conversation, ...]
    notes: dict[str, str | int | float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def has_arrivals(self) -> bool:
        """Whether the data set says when each request came."""
        return all(
            turn.arrival_s is not None
            for conversation in self.conversations
            for turn in conversation.turns
        )

    def digest(self) -> str:
        """Hexadecimal digest: equal for two workloads that send the same, in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for conversation in self.conversations:
            digest.update(b"conversation")
            for turn in conversation.turns:
                digest.update(f"{len(turn.input_ids)} {turn.output_tokens}".encode())
                digest.update(f" {turn.arrival_s!r} ".encode())
                digest.update(turn.input_ids.tobytes())
        return digest.hexdigest()


def longest_prompt(turns: Sequence[Turn]) -> int:
    """Tokens of the prompt of the last turn, which is a conversation's longest."""
    answers = sum(turn.output_tokens for turn in turns[:-1])
    return answers + sum(len(turn.input_ids) for turn in turns)


def trim(turns: Sequence[Turn], max_input_tokens: int | None) -> tuple[Turn, ...]:
    """The conversation with no prompt over ``max_input_tokens``; empty if that cannot be.

    The first turn loses tokens at its start, so that the question at its end stays; when what
    follows it is too long by itself, turns are dropped from the end.
    """
    kept = list(turns)
    if max_input_tokens is None:
        return tuple(kept)
    while kept:
        surplus = longest_prompt(kept) - max_input_tokens
        if surplus < len(kept[0].input_ids):
            if surplus > 0:
                kept[0] = replace(kept[0], input_ids=kept[0].input_ids[surplus:])
            return tuple(kept)
        kept.pop()
    return ()


def same_shape(workload: Workload, conversations: int, ids: IdRange, seed: int) -> Workload:
    """The first ``conversations`` of ``workload`` with other, random ids of the same lengths.

    What a server is warmed up with: it sees the shapes, and caches nothing of the real one.
    """
    rng = np.random.default_rng(seed)
    return Workload(
        f"{workload.name}, other ids",
        tuple(
            Conversation(
                tuple(
                    Turn(ids.random(rng, len(turn.input_ids)), turn.output_tokens)
                    for turn in conversation.turns
                )
            )
            for conversation in workload.conversations[:conversations]
        ),
    )
