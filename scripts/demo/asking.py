"""One question to the server: its streamed answer, and where its prompt's KV came from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import requests

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt. The three kinds of prompt tokens add up to all of them."""

    text: str
    output_ids: tuple[int, ...]
    prompt_tokens: int
    device_tokens: int
    donor_tokens: int
    ttft_s: float
    """From sending the request until the first piece of text arrived."""

    @property
    def recomputed_tokens(self) -> int:
        return self.prompt_tokens - self.device_tokens - self.donor_tokens


def ask(
    url: str, prompt_ids: Sequence[int], max_new_tokens: int, on_text: Callable[[str], None]
) -> Answer:
    """Send a prompt to the server at ``url`` and hand each piece of the answer to ``on_text``.

    Greedy. Raises requests.RequestException when the server does not answer, RuntimeError with
    its words when it refuses or ends the request.
    """
    body = {
        "input_ids": list(prompt_ids),
        "sampling_params": {"temperature": 0.0, "max_new_tokens": max_new_tokens},
        "stream": True,
    }
    started = time.monotonic()
    ttft_s = 0.0
    last: dict[str, object] = {}
    text = ""
    with requests.post(
        url + "/generate", json=body, stream=True, timeout=REQUEST_TIMEOUT_S
    ) as stream:
        if not stream.ok:
            raise RuntimeError(f"the server answered {stream.status_code}: {stream.text}")
        for line in stream.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            last = json.loads(line.removeprefix(b"data: "))
            if "error" in last:
                raise RuntimeError(f"the server ended the request: {last['error']}")
            ttft_s = ttft_s or time.monotonic() - started
            # The stream repeats the whole text so far; a character may be complete only later.
            whole = str(last["text"])
            on_text(whole.removeprefix(text))
            text = whole
    return _answer(last, ttft_s)


def _answer(response: dict[str, object], ttft_s: float) -> Answer:
    meta = response["meta_info"]
    ids = response["output_ids"]
    assert isinstance(meta, dict)
    assert isinstance(ids, list)
    cached = meta.get("cached_tokens_details") or {}  # None when nothing was cached
    return Answer(
        text=str(response["text"]),
        output_ids=tuple(ids),
        prompt_tokens=meta["prompt_tokens"],
        device_tokens=cached.get("device", 0),
        donor_tokens=cached.get("host", 0),
        ttft_s=ttft_s,
    )
