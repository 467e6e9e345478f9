"""Servers are expensive, so tests share them."""

from __future__ import annotations

from pathlib import Path

import pytest

import support.cpu_sglang  # noqa: F401  # before the tests here import SGLang
from support.conversations import hold, outputs
from support.server import Server

SMALL_POOL = ("--max-total-tokens", "512", "--random-seed", "1")


@pytest.fixture(scope="session")
def expected_outputs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What stock SGLang answers, with everything in its device pool."""
    tmp_path = tmp_path_factory.mktemp("stock")
    with Server(
        tiny_model, "--max-total-tokens", "8192", "--random-seed", "1", tmp_path=tmp_path
    ) as server:
        assert "swiftcache" not in server.server_info()["internal_states"][0]
        assert server.server_info()["enable_hierarchical_cache"] is False
        assert "impl=RadixCache " in server.log()
        return outputs(hold(server))
