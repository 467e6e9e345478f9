"""Servers are expensive, so tests share them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

import support.cpu_sglang  # noqa: F401  # before the tests here import SGLang
from support.conversations import hold, outputs
from support.server import Server

SMALL_POOL = ("--max-total-tokens", "512", "--random-seed", "1")


@pytest.fixture(scope="session")
def expected_outputs(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> list[list[int]]:
    """What stock SGLang answers, with everything in its device pool."""
    folder = tmp_path_factory.mktemp("stock")
    if worker_id == "master":
        return _answers_of_stock(tiny_model, folder)
    # The first of the processes that run the tests asks for all of them.
    shared = tmp_path_factory.getbasetemp().parent / "answers-of-stock.json"
    with FileLock(shared.with_suffix(".lock")):
        if not shared.exists():
            shared.write_text(json.dumps(_answers_of_stock(tiny_model, folder)))
        answers: list[list[int]] = json.loads(shared.read_text())
    return answers


def _answers_of_stock(model: Path, folder: Path) -> list[list[int]]:
    flags = ("--max-total-tokens", "8192", "--random-seed", "1")
    with Server(model, *flags, tmp_path=folder) as server:
        assert "swiftcache" not in server.server_info()["internal_states"][0]
        assert server.server_info()["enable_hierarchical_cache"] is False
        assert "impl=RadixCache " in server.log()
        return outputs(hold(server))
