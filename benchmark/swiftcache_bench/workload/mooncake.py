"""The Mooncake trace: requests of a chat service with arrival times, prompts given by hashes.

A row is ``{timestamp ms, input_length, output_length, hash_ids}``. A hash stands for one block of
512 tokens and for all blocks before it, so equal hashes are equal prefixes. Prompts are made up so
that this holds for what is sent, and no more is shared than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.tokens import IdRange, TokenIds
from swiftcache_bench.workload.base import Turn, Workload
from swiftcache_bench.workload.limits import Limits
from swiftcache_bench.workload.rows import read_lines

TRACE_BLOCK_TOKENS = 512


class TraceRow(msgspec.Struct):
    """One request: arrival in ms from the start of the trace, lengths in tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def load_mooncake(
    path: Path,
    ids: IdRange,
    limits: Limits,
    seed: int,
    *,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    time_scale: float = 1.0,
) -> Workload:
    """One request of one turn a row, in the order of the trace.

    ``block_tokens`` below 512 shrinks every prompt in that proportion and keeps what is shared;
    ``limits.max_input_tokens`` cuts prompts at their end, so that two that differ later become
    equal. Arrival times are multiplied by ``time_scale``.
    """
    if not 1 <= block_tokens <= TRACE_BLOCK_TOKENS:
        raise BenchmarkError(
            f"--trace-block-tokens {block_tokens} is not in 1 … {TRACE_BLOCK_TOKENS}"
        )
    if time_scale < 0:
        raise BenchmarkError(f"--time-scale {time_scale:g} is negative: 0.5 is twice as fast")
    blocks = _BlockIds(ids, seed, block_tokens)
    shortened = 0
    requests: list[list[Turn]] = []
    for row in _rows(path, limits.conversations):
        tokens = max(1, row.input_length * block_tokens // TRACE_BLOCK_TOKENS)
        prompt, shared = blocks.prompt(row.hash_ids, tokens)
        shortened += len(prompt) > (limits.max_input_tokens or len(prompt))
        prompt = prompt[: limits.max_input_tokens]
        answer = limits.output_tokens or max(1, row.output_length)
        arrival_s = row.timestamp / 1000 * time_scale
        requests.append([Turn(prompt, answer, min(shared, len(prompt)), arrival_s)])
    return limits.collect(
        f"Mooncake {path.stem}",
        requests,
        {"block_tokens": block_tokens, "time_scale": time_scale, "requests_shortened": shortened},
    )


class _BlockIds:
    """The token ids of each hash's block, and which hashes have been sent."""

    def __init__(self, ids: IdRange, seed: int, block_tokens: int) -> None:
        self._ids = ids
        self._seed = seed
        self._block_tokens = block_tokens
        self._sent: set[int] = set()

    def prompt(self, hashes: list[int], tokens: int) -> tuple[TokenIds, int]:
        """(the first ``tokens`` ids of the blocks, how many of these were sent before)."""
        used = hashes[: -(-tokens // self._block_tokens)]
        known = next((i for i, h in enumerate(used) if h not in self._sent), len(used))
        self._sent.update(used)
        prompt = np.concatenate([self._block(h) for h in used])[:tokens]
        return prompt, min(known * self._block_tokens, tokens)

    def _block(self, block_hash: int) -> TokenIds:
        # The hash itself, written in base `size`, comes first: blocks of two hashes differ within
        # those ids. What follows is random, so that nothing else is shared.
        digits: list[int] = []
        rest = block_hash
        while rest or not digits:
            rest, digit = divmod(rest, self._ids.size)
            digits.append(self._ids.first + digit)
        rng = np.random.default_rng([self._seed, block_hash])
        tail = self._ids.random(rng, max(0, self._block_tokens - len(digits)))
        block: TokenIds = np.concatenate([np.array(digits, dtype=np.uint32), tail])
        return block[: self._block_tokens]


def _rows(path: Path, limit: int) -> Iterator[TraceRow]:
    for number, row in read_lines(path, TraceRow, limit):
        blocks = -(-row.input_length // TRACE_BLOCK_TOKENS)
        if blocks < 1 or len(row.hash_ids) != blocks:
            raise BenchmarkError(
                f"{path}, line {number}: input_length {row.input_length} and "
                f"{len(row.hash_ids)} hash_ids, expected one for each {TRACE_BLOCK_TOKENS} tokens"
            )
        yield row
