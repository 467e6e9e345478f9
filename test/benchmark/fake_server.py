"""A stand-in for SGLang's HTTP server: same endpoints and streams, no model, faults on demand.

Answers are made of the prompt alone, and what it says of its cache is true of the prompts it has
seen. As a script it takes SGLang's command line, which it repeats in ``/server_info``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Fault = str
"""One of ``FAULTS``."""

FAULTS = ("refuse", "error", "abort", "drop", "cut", "short", "misread", "lose", "junk", "hang")
REFUSAL = "the fake refuses"
LAST_WORDS = "the fake gives up"
POOL_TOKENS = 200


def answer_ids(prompt: list[int], tokens: int) -> list[int]:
    return [(sum(prompt) + 7 * i) % 997 for i in range(tokens)]


@dataclass
class FakeServer:
    """``fault``: what goes wrong with a request, by its number from 0 and its body.

    ``incremental``: events carry new ids alone. ``tokenizer``: events carry text too.
    ``group``: tokens that come with each event.
    """

    info: dict[str, Any] = field(default_factory=dict)
    incremental: bool = False
    tokenizer: bool = True
    group: int = 1
    fault: Callable[[int, dict[str, Any]], Fault | None] = lambda number, body: None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    known: list[list[int]] = field(default_factory=list)
    flushes: int = 0
    running: int = 0
    most_running: int = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.info.get("model_path", "")})

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        self.known.clear()
        return web.Response(text="Cache flushed.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        fault = self.fault(len(self.bodies), body)
        self.bodies.append(body)
        if fault == "refuse":
            return web.Response(status=503, text=REFUSAL)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, fault)
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], fault: Fault | None
    ) -> web.StreamResponse:
        prompt, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        ids = answer_ids(prompt, tokens - 1 if fault == "short" else tokens)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events(prompt, ids, fault):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            await asyncio.sleep(0)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
            return response
        if fault == "junk":
            await response.write(b"data: {]\n\n")
        await response.write(b"data: [DONE]\n\n")
        self.known.append(prompt + ids)
        return response

    def _events(
        self, prompt: list[int], ids: list[int], fault: Fault | None
    ) -> list[dict[str, Any]]:
        if fault == "error":
            return [{"error": {"message": LAST_WORDS, "code": 400}}]
        cached = max((_common(prompt, known) for known in self.known), default=0)
        cached = min(cached, len(prompt) - 1)
        on_device = cached // 2
        events = []
        for start in range(0, len(ids), self.group):
            end = min(start + self.group, len(ids))
            meta = {
                "prompt_tokens": len(prompt) - (fault == "misread"),
                "completion_tokens": end,
                "cached_tokens": cached,
                "cached_tokens_details": (
                    {"device": on_device, "host": cached - on_device} if cached else None
                ),
                "finish_reason": {"type": "length"} if end == len(ids) else None,
            }
            event = {"output_ids": ids[start:end] if self.incremental else ids[:end]}
            events.append(event | {"meta_info": meta} | ({"text": "x"} if self.tokenizer else {}))
        if fault == "abort":
            events[-1]["meta_info"]["finish_reason"] = {"type": "abort", "message": LAST_WORDS}
        if fault in ("drop", "cut", "hang"):
            events = events[: len(events) // 2]
        if fault == "lose":
            events[-1]["output_ids"] = []
        return events


def _common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def flags_of(words: list[str]) -> dict[str, Any]:
    """The flags of a command line as /server_info would list them; the fake's own are left out."""
    info: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").replace("-", "_")
            info[name] = True
        else:
            info[name] = word
    return {name: value for name, value in info.items() if not name.startswith("fake_")}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-exit", action="store_true", help="end before serving")
    parser.add_argument("--fake-mark", help="pretend to be another server")
    parser.add_argument("--fake-change", help="NAME=VALUE: run another value of a flag")
    parser.add_argument("--fake-fault", help="of every request")
    parser.add_argument("--fake-child", help="file for the id of a process of its own")
    args, _ = parser.parse_known_args()
    if args.fake_exit:
        print(LAST_WORDS, flush=True)
        sys.exit(3)
    if args.fake_child:
        sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
        child = subprocess.Popen(sleeper, start_new_session=False)
        with open(args.fake_child, "w") as file:
            file.write(str(child.pid))
    info = flags_of(sys.argv[1:])
    info |= {"max_total_num_tokens": POOL_TOKENS, "max_req_input_len": POOL_TOKENS - 10}
    info["internal_states"] = [{"swiftcache": {"donors": [{"name": "bench-0"}]}}]
    if not info.get("swiftcache_runtime_dir") or os.environ.get("FAKE_NO_DONORS"):
        info["internal_states"] = [{}]
    if args.fake_mark:
        info["weight_version"] = args.fake_mark
    if args.fake_change:
        name, _, info[name] = args.fake_change.partition("=")
    server = FakeServer(info, fault=lambda number, body: args.fake_fault)
    app = server.application()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, shutdown_timeout=0.5)


if __name__ == "__main__":
    main()
