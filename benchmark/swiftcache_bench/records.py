"""What is kept of every request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from swiftcache_bench.client import Answer, Status
from swiftcache_bench.tokens import TokenIds


@dataclass(frozen=True)
class RequestRecord:
    """One request of a run. Times in seconds; ``due_s`` and ``sent_s`` from the run's start.

    ``ttft_s`` and ``latency_s`` count from ``due_s``, the moment its user sent it: what this client
    itself made it wait (``sent_s - due_s``) is part of them. ``prefix_tokens``: how much of the
    prompt an earlier request had sent or been answered, whether or not a server still has it.
    Digests are equal for equal token ids; that of the output is None without a whole answer.
    """

    conversation: int
    round: int
    measured: bool
    status: Status
    error: str | None
    due_s: float
    sent_s: float
    ttft_s: float | None
    latency_s: float | None
    itl_s: tuple[float, ...]
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    cached_tokens: int
    device_tokens: int
    host_tokens: int
    prompt_digest: str
    output_digest: str | None

    @property
    def ok(self) -> bool:
        return self.status is Status.OK

    @property
    def finished_s(self) -> float | None:
        return None if self.latency_s is None else self.due_s + self.latency_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None without a whole answer of two or more."""
        if self.latency_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


def record_of(
    answer: Answer,
    prompt: TokenIds,
    *,
    conversation: int,
    round_number: int,
    measured: bool,
    prefix_tokens: int,
    start_s: float,
    due_s: float,
) -> RequestRecord:
    """``start_s`` and ``due_s`` are of ``time.perf_counter``, as the times of ``answer`` are."""
    whole = answer.status is Status.OK
    return RequestRecord(
        conversation=conversation,
        round=round_number,
        measured=measured,
        status=answer.status,
        error=answer.error,
        due_s=due_s - start_s,
        sent_s=answer.sent_s - start_s,
        ttft_s=_since(due_s, answer.first_token_s),
        latency_s=_since(due_s, answer.finished_s) if whole else None,
        itl_s=tuple(answer.itl_s),
        prompt_tokens=answer.prompt_tokens,
        prefix_tokens=prefix_tokens,
        output_tokens=len(answer.output_ids),
        cached_tokens=answer.cached_tokens,
        device_tokens=answer.device_tokens,
        host_tokens=answer.host_tokens,
        prompt_digest=ids_digest(prompt),
        output_digest=ids_digest(answer.output_ids) if whole else None,
    )


def ids_digest(ids: TokenIds) -> str:
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s
