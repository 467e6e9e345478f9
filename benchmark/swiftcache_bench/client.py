"""Sends one request to a server and times its answer; never raises for what a server does."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

import aiohttp
import numpy as np
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from swiftcache_bench.answer_stream import AnswerAborted, AnswerBroken, AnswerStream
from swiftcache_bench.tokens import TokenIds

# A line holds all ids of an answer so far: 4 MiB is over 400,000 of them.
LINE_BYTES_MAX = 4 << 20
ERROR_TEXT_CHARS_MAX = 200


class Status(StrEnum):
    """How a request ended."""

    OK = "ok"
    FAILED = "failed"
    ABORTED = "aborted"
    TIMED_OUT = "timed out"


@dataclass(eq=False)
class Answer:
    """One request as seen from here. Times are of ``time.perf_counter``, in seconds.

    ``sent_s``: just before the request goes out; ``first_token_s`` and ``finished_s``: when the
    first and the last event with a token came, None where there was none. ``itl_s``: a gap for
    each token after the first event. ``device_tokens`` and ``host_tokens`` divide
    ``cached_tokens`` of the prompt by where they were found.
    """

    status: Status
    sent_s: float
    prompt_tokens: int
    error: str | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    itl_s: list[float] = field(default_factory=list)
    output_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.uint32))
    cached_tokens: int = 0
    device_tokens: int = 0
    host_tokens: int = 0


class Client:
    """Requests to the server at ``url``, as many at once as are asked for. One event loop.

    ``request_timeout_s`` is for a whole request. Use as an asynchronous context manager.
    """

    def __init__(self, url: str, request_timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._timeout_s = request_timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A kept-alive connection may be closed by the server just as a request goes out on it, and
        # a POST is not tried again: each request has a connection of its own.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=self._timeout,
            read_bufsize=LINE_BYTES_MAX,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._http is not None
        await self._http.close()

    async def generate(self, body: bytes, prompt_tokens: int, output_tokens: int) -> Answer:
        """Send ``body`` (of `request_body`) and read the whole answer."""
        assert self._http is not None, "the client is used as a context manager"
        stream = AnswerStream()
        answer = Answer(Status.FAILED, time.perf_counter(), prompt_tokens)
        try:
            async with self._http.post(
                f"{self._url}/generate", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise AnswerBroken(await _refusal(response))
                async for line in response.content:
                    stream.feed(line, time.perf_counter())
            answer.output_ids = stream.finish(prompt_tokens, output_tokens)
            answer.status = Status.OK
        except AnswerAborted as error:
            answer.status, answer.error = Status.ABORTED, str(error)
        except AnswerBroken as error:
            answer.error = str(error)
        except TimeoutError:
            answer.status = Status.TIMED_OUT
            answer.error = f"no complete answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
            answer.error = " ".join(f"{type(error).__name__}: {error}".split())
        answer.first_token_s = stream.first_token_s
        answer.finished_s = stream.last_token_s
        answer.itl_s = stream.itl_s
        answer.cached_tokens = stream.cached_tokens
        answer.device_tokens = stream.device_tokens
        answer.host_tokens = stream.host_tokens
        return answer


def request_body(input_ids: TokenIds, output_tokens: int) -> bytes:
    """A streamed, greedy ``/generate`` request for exactly ``output_tokens`` tokens."""
    sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True}
    return orjson.dumps(
        {"input_ids": input_ids, "sampling_params": sampling, "stream": True},
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


async def _refusal(response: aiohttp.ClientResponse) -> str:
    text = " ".join((await response.text(errors="replace")).split())
    return f"HTTP {response.status}: {text[:ERROR_TEXT_CHARS_MAX] or response.reason}"
