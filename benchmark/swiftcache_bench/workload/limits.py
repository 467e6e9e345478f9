"""How much of a data set is sent, and how long its answers are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import TokenIds
from swiftcache_bench.workload.base import Conversation, Turn, Workload, trim


@dataclass(frozen=True)
class Limits:
    """At most so many conversations, rounds of each, and tokens of a prompt (None: no limit).

    ``output_tokens``: the length of every answer; None takes the length that the data set gives.
    """

    conversations: int
    rounds: int | None = None
    max_input_tokens: int | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        given = (self.conversations, self.rounds, self.max_input_tokens, self.output_tokens)
        if any(value is not None and value < 1 for value in given):
            raise BenchmarkError("numbers of clients, rounds and tokens must be at least 1")

    def answer_tokens(self, reference: str, encode: Callable[[str], TokenIds]) -> int:
        """Length of the answer to a turn whose answer in the data set is ``reference``."""
        if self.output_tokens is not None:
            return self.output_tokens
        return max(1, len(encode(reference)))

    def collect(
        self, name: str, conversations: Iterable[list[Turn]], notes: dict[str, str | int | float]
    ) -> Workload:
        """A workload of ``conversations`` held to these limits; says in its notes what was cut.

        Raises BenchmarkError when nothing is left.
        """
        kept: list[Conversation] = []
        shortened = left_out = 0
        for turns in conversations:
            if len(kept) == self.conversations:
                break
            asked = turns[: self.rounds]
            fitting = trim(asked, self.max_input_tokens)
            shortened += bool(fitting) and not _same_length(asked, fitting)
            left_out += not fitting
            if fitting:
                kept.append(Conversation(fitting))
        if not kept:
            raise BenchmarkError(
                f"{name}: no conversation to send ({left_out} left out): raise --max-input-length "
                "or give another --dataset-path"
            )
        return Workload(
            name,
            tuple(kept),
            notes | {"conversations_shortened": shortened, "conversations_left_out": left_out},
        )


def _same_length(left: list[Turn], right: tuple[Turn, ...]) -> bool:
    return [len(turn.input_ids) for turn in left] == [len(turn.input_ids) for turn in right]
