"""One streamed answer of ``/generate``: its events, read into token ids and times."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from swiftcache_bench.tokens import TokenIds

_DATA = b"data:"
_DONE = b"[DONE]"


class AnswerBroken(Exception):
    """The answer is not the one that was asked for. The message says how, in one line."""


class AnswerAborted(AnswerBroken):
    """The server gave the request up."""


class AnswerStream:
    """Takes the lines of a response as they come, each with the time it came at (seconds).

    Servers send all ids so far with every event, or only the new ones
    (``--incremental-streaming-output``); both are understood, and servers without a tokenizer too.
    """

    def __init__(self) -> None:
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.itl_s: list[float] = []
        self.cached_tokens = 0
        self.device_tokens = 0
        self.host_tokens = 0
        self._ids: list[int] = []
        self._prompt_tokens: int | None = None
        self._finish: dict[str, Any] | None = None

    def feed(self, line: bytes, at_s: float) -> None:
        """One line of the body. Raises AnswerBroken, or AnswerAborted, for an event that says so.

        An event with several tokens counts as that many, the time since the last event divided
        among them.
        """
        data = line.strip().removeprefix(_DATA).strip()
        if not line.startswith(_DATA) or data == _DONE:
            return
        try:
            event = orjson.loads(data)
            if "error" in event:
                raise AnswerBroken(f"the server answered {_error_text(event['error'])}")
            self._take(event["output_ids"], event["meta_info"], at_s)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise AnswerBroken(
                f"the stream holds an event that is no answer of /generate: {error!r}"
            ) from None

    def finish(self, prompt_tokens: int, output_tokens: int) -> TokenIds:
        """The ids of the whole answer, once the body has ended, checked against what was asked.

        Raises AnswerBroken, AnswerAborted.
        """
        got = len(self._ids)
        if self._finish is None:
            raise AnswerBroken(f"the stream ended after {got} of {output_tokens} tokens")
        if self._finish.get("type") == "abort":
            raise AnswerAborted(f"aborted: {self._finish.get('message') or 'no reason given'}")
        if self._prompt_tokens != prompt_tokens:
            raise AnswerBroken(
                f"the server read {self._prompt_tokens} tokens of a prompt of {prompt_tokens}"
            )
        if got != output_tokens:
            raise AnswerBroken(f"the answer ended after {got} of {output_tokens} tokens")
        return np.array(self._ids, dtype=np.uint32)

    def _take(self, ids: list[int], meta: dict[str, Any], at_s: float) -> None:
        known, total = len(self._ids), meta["completion_tokens"]
        if len(ids) >= total:
            self._ids = ids[:total]
        elif known + len(ids) == total:
            self._ids += ids
        else:
            raise AnswerBroken(
                f"the stream lost tokens: {len(ids)} ids after {known}, of {total} in all"
            )
        self._prompt_tokens = meta["prompt_tokens"]
        self._finish = meta.get("finish_reason") or self._finish
        self.cached_tokens = meta.get("cached_tokens") or 0
        details = meta.get("cached_tokens_details") or {"device": self.cached_tokens}
        self.device_tokens = details.get("device") or 0
        self.host_tokens = details.get("host") or 0
        new = total - known
        if new <= 0:
            return
        if self.last_token_s is None:
            self.first_token_s = at_s
        else:
            self.itl_s += [(at_s - self.last_token_s) / new] * new
        self.last_token_s = at_s


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return json.dumps(message)
