"""Long contexts, each with queries that are requests of their own and share it as a prefix.

Reads upstream's form, ``{"contexts": {id: text}, "queries": [{"context", "question",
"reference_answer"}]}``, and L-Eval rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import TextEncoder, TokenIds
from swiftcache_bench.workload.base import Turn, Workload
from swiftcache_bench.workload.leval import read_leval_rows
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.rows import read_document


class ContextQuery(msgspec.Struct):
    context: str | int
    question: str
    reference_answer: str


class ContextFile(msgspec.Struct):
    contexts: dict[str, str]
    queries: list[ContextQuery]


class _Query(NamedTuple):
    context: str
    question: str
    answer: str


def load_contexts(path: Path, encoder: TextEncoder, limits: Limits) -> Workload:
    """A request a query, context first, in the order of the file."""
    queries = _leval_queries(path) if path.suffix == ".jsonl" else _file_queries(path)
    return limits.collect(
        f"contexts {path.stem}",
        _requests(queries, encoder, limits),
        {"tokenizer": encoder.name},
    )


def _requests(
    queries: Iterator[_Query], encoder: TextEncoder, limits: Limits
) -> Iterator[list[Turn]]:
    encoded: dict[str, TokenIds] = {}
    for query in queries:
        question = encoder.encode(f"\n\nQuestion: {query.question}\nAnswer:")
        shared = query.context in encoded
        if not shared:
            encoded[query.context] = encoder.encode(query.context)
        context = encoded[query.context]
        if limits.max_input_tokens is not None:
            # The end is cut, not the start: queries of one context must go on sharing it.
            context = context[: max(0, limits.max_input_tokens - len(question))]
        answer = limits.answer_tokens(query.answer, encoder.encode)
        prompt = np.concatenate([context, question])
        yield [Turn(prompt, answer, shared_tokens=len(context) if shared else 0)]


def _file_queries(path: Path) -> Iterator[_Query]:
    document = read_document(path, ContextFile)
    for number, query in enumerate(document.queries):
        context = document.contexts.get(str(query.context))
        if context is None:
            raise BenchmarkError(
                f"{path}, query {number}: its context {query.context!r} is not among the contexts"
            )
        yield _Query(context, query.question, query.reference_answer)


def _leval_queries(path: Path) -> Iterator[_Query]:
    for row in read_leval_rows(path):
        for question, answer in zip(row.instructions, row.outputs, strict=True):
            yield _Query(row.input, question, answer)
