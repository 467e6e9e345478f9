"""TTFT of one long prefix, one request at a time: not cached, on the device, pushed out of it.

For each length a prompt is sent (``cold``), sent again (``device``), and sent a third time after
other prompts have filled the device's KV pool (``evicted``): a tier has it, or it is recomputed.
Where the tokens were found is what the server says, kept with each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from swiftcache_bench.client import Client, request_body
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.records import RequestRecord, record_of
from swiftcache_bench.tokens import IdRange, TokenIds

Phase = Literal["cold", "device", "evicted"]

# The pool is filled this many times over with other prompts, so that the first is out for certain.
FILL_FACTOR = 1.1


@dataclass(frozen=True)
class ProbeSettings:
    """``lengths`` in tokens, each ``repeats`` times with a prompt of its own."""

    lengths: tuple[int, ...]
    repeats: int = 3
    output_tokens: int = 8
    seed: int = 1


@dataclass(frozen=True)
class ProbeRecord:
    """One timed request of the probe."""

    length: int
    repeat: int
    phase: Phase
    request: RequestRecord


@dataclass(frozen=True)
class ProbeResult:
    """Timed requests, and how many of those that fill the pool were not answered."""

    records: list[ProbeRecord]
    fillers: int
    failed_fillers: int

    @property
    def complete(self) -> bool:
        return not self.failed_fillers and all(record.request.ok for record in self.records)


def probe_prefixes(
    url: str,
    settings: ProbeSettings,
    ids: IdRange,
    *,
    pool_tokens: int,
    max_prompt_tokens: int,
    request_timeout_s: float,
) -> ProbeResult:
    """``pool_tokens``: the device's KV pool; ``max_prompt_tokens``: the longest prompt it takes.

    Raises BenchmarkError for a length that does not fit, before anything is sent.
    """
    too_long = [n for n in settings.lengths if not 1 <= n <= max_prompt_tokens]
    if too_long:
        raise BenchmarkError(
            f"a prefix of {too_long[0]} tokens cannot be sent: expected 1 … {max_prompt_tokens}, "
            "the server's max_req_input_len"
        )

    async def run() -> ProbeResult:
        async with Client(url, request_timeout_s) as client:
            probe = _Probe(client, settings, ids, int(pool_tokens * FILL_FACTOR))
            for length in settings.lengths:
                for repeat in range(settings.repeats):
                    await probe.one_prefix(length, repeat)
            return ProbeResult(probe.records, probe.fillers, probe.failed_fillers)

    return asyncio.run(run())


def phase_times_s(records: Sequence[ProbeRecord], length: int, phase: Phase) -> list[float]:
    """TTFTs of one length and phase, of requests that were answered."""
    return [
        record.request.ttft_s
        for record in records
        if record.length == length and record.phase == phase and record.request.ok
        if record.request.ttft_s is not None
    ]


class _Probe:
    def __init__(
        self, client: Client, settings: ProbeSettings, ids: IdRange, fill_tokens: int
    ) -> None:
        self.records: list[ProbeRecord] = []
        self.fillers = 0
        self.failed_fillers = 0
        self._client = client
        self._settings = settings
        self._ids = ids
        self._fill_tokens = fill_tokens
        self._rng = np.random.default_rng(settings.seed)
        self._start_s = time.perf_counter()

    async def one_prefix(self, length: int, repeat: int) -> None:
        prompt = self._ids.random(self._rng, length)
        await self._timed(prompt, length, repeat, "cold")
        await self._timed(prompt, length, repeat, "device")
        await self._fill(length)
        await self._timed(prompt, length, repeat, "evicted")

    async def _timed(self, prompt: TokenIds, length: int, repeat: int, phase: Phase) -> None:
        request = await self._request(prompt, 0 if phase == "cold" else length)
        self.records.append(ProbeRecord(length, repeat, phase, request))

    async def _fill(self, length: int) -> None:
        for _ in range(-(-self._fill_tokens // length)):
            request = await self._request(self._ids.random(self._rng, length), 0)
            self.fillers += 1
            self.failed_fillers += not request.ok

    async def _request(self, prompt: TokenIds, prefix_tokens: int) -> RequestRecord:
        output_tokens = self._settings.output_tokens
        body = request_body(prompt, output_tokens)
        answer = await self._client.generate(body, len(prompt), output_tokens)
        return record_of(
            answer,
            prompt,
            conversation=len(self.records),
            round_number=0,
            measured=True,
            prefix_tokens=prefix_tokens,
            start_s=self._start_s,
            due_s=answer.sent_s,
        )
