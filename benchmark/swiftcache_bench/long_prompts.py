"""One long prompt at a time: whether it is served, what is said, and how long each token takes."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import requests

# The first ids are often those of special tokens.
FIRST_ID = 10


@dataclass(frozen=True)
class LongAnswer:
    """The answer to one prompt."""

    length: int
    """Tokens of the prompt."""
    error: str | None = None
    """Why it was not served."""
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    """Median time between two tokens."""
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prompt_ids(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random ids below ``vocabulary``, the same for every server."""
    ids = np.random.default_rng(seed).integers(FIRST_ID, vocabulary, size=length)
    return [int(number) for number in ids]


def ask(url: str, ids: Sequence[int], output_tokens: int, timeout_s: float) -> LongAnswer:
    """Send one prompt and read its answer token by token, greedily decoded."""
    body = {
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": 0.0,
            "ignore_eos": True,
            "max_new_tokens": output_tokens,
        },
        "return_logprob": True,
        "stream": True,
    }
    sent = time.perf_counter()
    times: list[float] = []
    last: dict[str, Any] = {}
    try:
        with requests.post(f"{url}/generate", json=body, stream=True, timeout=timeout_s) as answer:
            if not answer.ok:
                return LongAnswer(len(ids), error=" ".join(answer.text.split())[:300])
            for last in _events(answer):
                if "error" in last:
                    return LongAnswer(len(ids), error=str(last["error"])[:300])
                times.append(time.perf_counter())
    except requests.RequestException as error:
        return LongAnswer(len(ids), error=f"{type(error).__name__}: no answer")
    reason = last.get("meta_info", {}).get("finish_reason") or {}
    if not times or reason.get("type") == "abort":
        return LongAnswer(len(ids), error=str(reason.get("message", "no token came"))[:300])
    meta = last["meta_info"]
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    return LongAnswer(
        len(ids),
        None,
        tuple(last["output_ids"]),
        tuple(item[0] for item in meta.get("output_token_logprobs", ())),
        (times[0] - sent) * 1e3,
        statistics.median(gaps) * 1e3 if gaps else 0.0,
        int(meta.get("cached_tokens", 0)),
    )


def _events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


@dataclass(frozen=True)
class Agreement:
    """How far an answer agrees with another one to the same prompt."""

    same_tokens: int
    of_tokens: int
    largest_logprob_difference: float
    """Over the tokens before the first that differs."""

    @property
    def complete(self) -> bool:
        return self.same_tokens == self.of_tokens


def compare(answer: LongAnswer, expected: LongAnswer) -> Agreement:
    """Tokens up to the first that differs, and their log-probabilities."""
    pairs = list(zip(answer.output_ids, expected.output_ids, strict=False))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    differences = [
        abs(a - b) for a, b in zip(answer.logprobs[:same], expected.logprobs[:same], strict=False)
    ]
    return Agreement(same, len(expected.output_ids), max(differences, default=0.0))
