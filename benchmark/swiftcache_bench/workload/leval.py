"""L-Eval rows as conversations: the document and a first question, then a question a turn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import TextEncoder
from swiftcache_bench.workload.base import Turn, Workload
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.rows import read_lines


class LEvalRow(msgspec.Struct):
    """One row: a long document, questions on it, and the reference answer to each."""

    input: str
    instructions: list[str]
    outputs: list[str]


def read_leval_rows(path: Path) -> Iterator[LEvalRow]:
    """The rows of a task's file. Raises BenchmarkError for one whose answers do not match."""
    for number, row in read_lines(path, LEvalRow):
        if not row.instructions or len(row.instructions) != len(row.outputs):
            raise BenchmarkError(
                f"{path}, line {number}: {len(row.instructions)} instructions and "
                f"{len(row.outputs)} outputs, expected as many of each and at least one"
            )
        yield row


def load_leval(path: Path, encoder: TextEncoder, limits: Limits) -> Workload:
    """One conversation a row. Text is sent as it is, without a chat template."""
    conversations = (_turns(row, encoder, limits) for row in read_leval_rows(path))
    return limits.collect(f"L-Eval {path.stem}", conversations, {"tokenizer": encoder.name})


def _turns(row: LEvalRow, encoder: TextEncoder, limits: Limits) -> list[Turn]:
    turns = []
    for number, (question, answer) in enumerate(zip(row.instructions, row.outputs, strict=True)):
        before = "" if number else row.input
        text = f"{before}\n\nQuestion: {question}\nAnswer:"
        turns.append(Turn(encoder.encode(text), limits.answer_tokens(answer, encoder.encode)))
    return turns
