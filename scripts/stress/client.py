"""What the stress asks of a server, over HTTP. Safe to use from several threads."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

CONTROL_TIMEOUT_S = 60.0


class Lost(Exception):
    """A request that was not answered, or not as a request must be; one line says how."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt; an aborted one may have fewer ids than were asked for."""

    output_ids: tuple[int, ...]
    aborted: bool
    device_tokens: int
    donor_tokens: int


class Client:
    """Greedy requests to the server at ``url``; each may take ``timeout_s``."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s

    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        *,
        request_id: str,
        abort_after_s: float | None = None,
    ) -> Answer:
        """Ask and wait for the answer; abort it by name after a while, if so told.

        Raises Lost: no answer in time, a refusal, or an end that nobody asked for.
        """
        body = {**_body(prompt, new_tokens), "rid": request_id}
        timer = None
        if abort_after_s is not None:
            timer = threading.Timer(abort_after_s, self._abort, (request_id,))
            timer.start()
        try:
            with _lost_if_unanswered():
                response = requests.post(f"{self.url}/generate", json=body, timeout=self._timeout_s)
        finally:
            if timer is not None:
                timer.cancel()
                timer.join()
        if not response.ok:
            raise Lost(f"refused with {response.status_code}: {response.text[:200]}")
        answer = _answer(response.json())
        if answer.aborted and abort_after_s is None:
            raise Lost("ended by the server, though nobody aborted it")
        if not answer.aborted and len(answer.output_ids) != new_tokens:
            raise Lost(f"{len(answer.output_ids)} tokens came, {new_tokens} were asked for")
        return answer

    def generate_and_hang_up(
        self, prompt: Sequence[int], new_tokens: int, *, after_events: int
    ) -> None:
        """Ask for a stream and close the connection after some of its events.

        Raises Lost where it broke off before.
        """
        body = {**_body(prompt, new_tokens), "stream": True}
        with (
            _lost_if_unanswered(),
            requests.post(
                f"{self.url}/generate", json=body, timeout=self._timeout_s, stream=True
            ) as stream,
        ):
            if not stream.ok:
                raise Lost(f"refused with {stream.status_code}")
            events = 0
            for line in stream.iter_lines():
                events += line.startswith(b"data: ")
                if events >= after_events or line == b"data: [DONE]":
                    return
        raise Lost(f"the stream broke off after {events} events")

    def flush(self) -> None:
        """Empty the prefix cache. Raises Lost where requests are left that do not end."""
        with _lost_if_unanswered():
            response = requests.post(
                f"{self.url}/flush_cache",
                params={"timeout": CONTROL_TIMEOUT_S / 2},
                timeout=CONTROL_TIMEOUT_S,
            )
        if not response.ok:
            raise Lost(f"the cache was not flushed: {response.text[:200]}")

    def server_info(self) -> dict[str, Any]:
        """Raises Lost where the server does not answer."""
        with _lost_if_unanswered():
            response = requests.get(f"{self.url}/server_info", timeout=CONTROL_TIMEOUT_S)
            response.raise_for_status()
        info: dict[str, Any] = response.json()
        return info

    def tier(self) -> dict[str, Any]:
        """What the server says of its donors. Raises Lost where it does not answer."""
        state: dict[str, Any] = self.server_info()["internal_states"][0].get("swiftcache", {})
        return state

    def _abort(self, request_id: str) -> None:
        # The request that it is for says whether it was lost.
        with contextlib.suppress(requests.RequestException):
            requests.post(
                f"{self.url}/abort_request", json={"rid": request_id}, timeout=CONTROL_TIMEOUT_S
            )


@contextlib.contextmanager
def _lost_if_unanswered() -> Any:
    try:
        yield
    except requests.RequestException as error:
        raise Lost(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error


def _body(prompt: Sequence[int], new_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new_tokens}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def _answer(response: dict[str, Any]) -> Answer:
    try:
        meta = response["meta_info"]
        cached = meta.get("cached_tokens_details") or {}  # None when nothing was cached
        return Answer(
            output_ids=tuple(response["output_ids"]),
            aborted=(meta["finish_reason"] or {}).get("type") == "abort",
            device_tokens=cached.get("device", 0),
            donor_tokens=cached.get("host", 0),
        )
    except (KeyError, TypeError) as error:
        raise Lost(f"no answer to a request: {json.dumps(response)[:200]}") from error
