"""The examples run, as a reader would run them, against a server with a donor."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--page-size", "16", "--max-total-tokens", "2048", "--enable-cache-report")
    tmp_path = tmp_path_factory.mktemp("examples")
    with Server(
        tiny_model, *flags, "--swiftcache-donors", "host=64MiB", tmp_path=tmp_path
    ) as running:
        yield running


def test_frontend_program_reuses_the_prefix_in_every_turn_and_fork(server: Server) -> None:
    output = _run("frontend_chat.py", "--base-url", server.url)
    pieces = re.findall(
        r"^  prompt (\d+) tokens, (\d+) from the device, (\d+) from donors$", output, re.MULTILINE
    )
    child, engineer, definition, reason = (
        (int(prompt), int(device) + int(donors)) for prompt, device, donors in pieces
    )
    for later in (reason, child, engineer):
        # The whole conversation so far, but for what does not fill a page of 16 tokens.
        assert later[1] >= definition[0] - 16
    assert child[1] >= reason[0] - 16


def test_openai_chat_reports_cached_tokens(server: Server) -> None:
    output = _run("openai_chat.py", "--base-url", f"{server.url}/v1")
    turns = re.findall(r"^ +prompt (\d+) tokens, (\d+) cached$", output, re.MULTILINE)
    assert len(turns) == 3
    for (before, _), (_, cached) in itertools.pairwise(turns):
        assert int(cached) >= int(before) - 16


def _run(example: str, *args: str) -> str:
    """Run an example to its end; returns what it printed."""
    command = [sys.executable, str(EXAMPLES / example), *args]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
