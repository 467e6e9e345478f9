"""What the server is doing when the fault comes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import requests

from faults.stage import ANSWER_TOKENS, DEADLINE_S, LONG_ANSWER_TOKENS, Stage

POLL_S = 0.002
TOKENS_BEFORE_FAULT = 3


class Missed(Exception):
    """The phase was over before the fault could come: to be tried again."""


@dataclass
class Tally:
    """What became of requests; a line for each that failed or was answered wrong."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, expected: list[int], answer: Callable[[], list[int]]) -> None:
        try:
            got = answer()
        except Exception as error:  # whatever it is, a user would see it
            self.failed.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        self.answered += 1
        if got != expected:
            self.wrong.append(f"{what}: {got}, expected {expected}")


class Stream:
    """One request whose tokens are counted as they come. Its thread ends with it."""

    def __init__(self, stage: Stage, prompt: list[int], new_tokens: int) -> None:
        self.tokens = 0
        self._over = threading.Event()
        self._url = stage.server.url
        self._body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0.0,
                "ignore_eos": True,
                "max_new_tokens": new_tokens,
            },
            "stream": True,
        }
        self._answer: Future[list[int]] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def over(self) -> bool:
        return self._answer.done()

    def answer(self) -> list[int]:
        return self._answer.result(DEADLINE_S)

    def _run(self) -> None:
        try:
            ids: list[int] = []
            with requests.post(
                f"{self._url}/generate", json=self._body, stream=True, timeout=DEADLINE_S
            ) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        ids = list(event["output_ids"])
                        self.tokens = len(ids)
            wanted = self._body["sampling_params"]["max_new_tokens"]  # type: ignore[index]
            if len(ids) != wanted:
                raise ConnectionError(f"the stream ended after {len(ids)} of {wanted} tokens")
            self._answer.set_result(ids)
        except Exception as error:
            self._answer.set_exception(error)


@contextmanager
def idle(stage: Stage, tally: Tally) -> Iterator[None]:
    """Nothing runs; all prompts lie on donors or the device."""
    yield


@contextmanager
def prefilling(stage: Stage, tally: Tally) -> Iterator[None]:
    """A prompt of several chunks is being computed, and written to donors as it goes."""
    before = stage.tier()["requests"]
    stream = Stream(stage, stage.long_prompt, ANSWER_TOKENS)
    _wait(lambda: stage.tier()["requests"] > before or stream.over)
    if stream.tokens or stream.over:
        stream.answer()
        raise Missed
    yield
    tally.note("prefilling", stage.expected_long, stream.answer)


@contextmanager
def loading(stage: Stage, tally: Tally) -> Iterator[None]:
    """Four prompts are being restored, one after the other, and answered."""
    before = stage.tier()["bytes"]["loaded"]
    chosen = range(4)
    with ThreadPoolExecutor(len(chosen)) as pool:
        answers = [pool.submit(stage.ask, stage.prompts[i]) for i in chosen]
        _wait(lambda: stage.tier()["bytes"]["loaded"] > before or all(a.done() for a in answers))
        if all(answer.done() for answer in answers):
            raise Missed
        yield
        for i, answer in zip(chosen, answers, strict=True):
            tally.note(f"loading {i}", stage.expected[i], answer.result)


@contextmanager
def decoding(stage: Stage, tally: Tally) -> Iterator[None]:
    """A long answer is being given to a prompt that is on the device."""
    stream = Stream(stage, stage.prompts[-1], LONG_ANSWER_TOKENS)
    _wait(lambda: stream.tokens >= TOKENS_BEFORE_FAULT or stream.over)
    if stream.over:
        stream.answer()
        raise Missed
    yield
    tally.note("decoding", stage.expected_long_answer, stream.answer)


@contextmanager
def streaming(stage: Stage, tally: Tally) -> Iterator[None]:
    """A long answer is being given to a prompt too long for the device: layers are streamed."""
    stream = Stream(stage, stage.long_prompt, LONG_ANSWER_TOKENS)
    _wait(lambda: stream.tokens >= TOKENS_BEFORE_FAULT or stream.over)
    if stream.over:
        stream.answer()
        raise Missed
    assert stage.tier()["layer_stream"]["window_slots"]["used"] > 0, "nothing is streamed"
    yield
    tally.note("streaming", stage.expected_streamed, stream.answer)


PHASES = {each.__name__: each for each in (idle, prefilling, loading, decoding, streaming)}


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the phase was not reached within {DEADLINE_S:g} s")
        time.sleep(POLL_S)
