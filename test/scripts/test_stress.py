"""The stress tells a right server from a wrong one, on a server that is made up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stress.__main__ import main
from stress.donor_memory import Flipper, extents_of
from stress.prompts import make_prompts
from support.processes import wait_until

PLAN = ("--seconds", "0.4", "--round-s", "0.1", "--prompts", "6", "--prompt-tokens", "20")


class MadeUpServer(ThreadingHTTPServer):
    """Answers a prompt with numbers made from it; ``broken`` says what it does wrong."""

    def __init__(self, broken: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.broken = broken
        self.asked = 0
        self.tier: dict[str, Any] | None = {
            "donors": [{"name": "ada", "pid": os.getpid(), "device": "host"}],
            "blocks": {"used": 0, "retiring": 0, "free": 8, "total": 8},
            "corrupt_blocks": 0,
        }
        self.verify = True
        self.pool_tokens = 40

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def first_answers_given(self) -> bool:
        return self.asked > 6


class _Handler(BaseHTTPRequestHandler):
    server: MadeUpServer

    def do_GET(self) -> None:
        tier = {} if self.server.tier is None else {"swiftcache": self.server.tier}
        self._send(
            {
                "internal_states": [tier],
                "max_total_num_tokens": self.server.pool_tokens,
                "swiftcache_verify": self.server.verify,
            }
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if self.path == "/generate":
            self._generate(body)
        else:
            self._send({})

    def _generate(self, body: dict[str, Any]) -> None:
        server = self.server
        server.asked += 1
        assert server.tier is not None
        late = server.first_answers_given
        if late and server.broken != "never corrupt":
            server.tier["corrupt_blocks"] += 1
        prompt = body["input_ids"]
        ids = [sum(prompt) % 997 + i for i in range(body["sampling_params"]["max_new_tokens"])]
        reason = {"type": "length"}
        if late and server.broken == "wrong token":
            ids[-1] += 1
        if late and server.broken == "short":
            ids.pop()
        if late and server.broken == "aborted":
            ids, reason = ids[:3], {"type": "abort"}
        if late and server.broken == "refused":
            self._send({"error": "out of memory"}, 500)
            return
        host = 0 if server.broken == "never restored" else 10
        details = {"device": 0, "host": host}
        answer = {
            "output_ids": ids,
            "meta_info": {"finish_reason": reason, "cached_tokens_details": details},
        }
        if body.get("stream"):
            end = b"" if late and server.broken == "breaks off" else b"data: [DONE]\n\n"
            self._send_raw(b"data: " + json.dumps(answer).encode() + b"\n\n" + end)
        else:
            self._send(answer)
        if late and server.broken == "leak":
            server.tier["blocks"]["used"] = 3

    def _send(self, answer: dict[str, Any], status: int = 200) -> None:
        self._send_raw(json.dumps(answer).encode(), status)

    def _send_raw(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(broken: str = "") -> Iterator[MadeUpServer]:
    with MadeUpServer(broken) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def extent() -> Iterator[int]:
    """This process is the donor."""
    descriptor = os.memfd_create("extent")
    os.ftruncate(descriptor, 4096)
    yield descriptor
    os.close(descriptor)


def test_a_server_that_is_right_passes(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["--url", server.url, *PLAN]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("passed")
    assert "PROBLEM" not in shown


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("wrong token", "wrong token: prompt "),
        ("short", "15 tokens came, 16 were asked for"),
        ("aborted", "ended by the server, though nobody aborted it"),
        ("refused", "refused with 500"),
        ("breaks off", "the stream broke off after 1 events"),
        ("leak", "donor blocks are still in use after a flush"),
        ("never restored", "nothing was restored from donors"),
        ("never corrupt", "no restore met a flipped bit"),
    ],
)
def test_a_server_that_is_wrong_fails_and_the_reason_is_named(
    broken: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(broken) as server:
        assert main(["--url", server.url, *PLAN]) == 1
    shown = capsys.readouterr().out
    assert f"PROBLEM: {named}" in shown or f": {named}" in shown
    assert shown.rstrip().endswith("failed")


def refusal(url: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["--url", url, *PLAN, *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


def test_a_server_that_the_run_would_show_nothing_about_is_refused(
    capsys: pytest.CaptureFixture[str], extent: int
) -> None:
    with serving() as server:
        server.verify = False
        assert "--swiftcache-verify" in refusal(server.url, capsys)
        server.verify, server.pool_tokens = True, 100_000
        assert "--max-total-tokens" in refusal(server.url, capsys)
        server.pool_tokens, server.tier = 40, None
        assert "--swiftcache-donors" in refusal(server.url, capsys)
        assert server.asked == 0
    assert "no server at" in refusal(server.url, capsys)


def test_bits_are_flipped_in_the_memory_of_donors(extent: int) -> None:
    donors = [{"name": "ada", "pid": os.getpid()}, {"name": "gone", "pid": 2**22}]
    found = extents_of(donors)
    assert Path(f"/proc/{os.getpid()}/fd/{extent}") in found
    with Flipper([Path(f"/proc/self/fd/{extent}")], per_s=1000, seed=1) as flipper:
        wait_until(lambda: flipper.flips >= 3, 30, "three bits are flipped")
    changed = [byte for byte in os.pread(extent, 4096, 0) if byte]
    assert 1 <= len(changed) <= flipper.flips


def test_prompts_are_distinct_and_share_prefixes_of_all_kinds() -> None:
    prompts = make_prompts(24, 100, seed=1)
    assert prompts == make_prompts(24, 100, seed=1)
    assert len({tuple(prompt) for prompt in prompts}) == 24
    shared = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        for n, a in enumerate(prompts)
        for b in prompts[:n]
    ]
    assert max(shared) > 50
    assert 0 in shared
