"""The longest-prompt benchmark: its sizes, and what it makes of answers."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from benchmark.conftest import BENCHMARK
from benchmark.fake_server import FakeServer, answer_ids
from benchmark.serving import serving

from swiftcache_bench.long_prompts import LongAnswer, ask, compare, prompt_ids

sys.path.insert(0, str(BENCHMARK / "max_context"))

import bench_max_context

QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "vocab_size": 151936,
}


def ask_fake(server: FakeServer, ids: list[int], tokens: int) -> LongAnswer:
    async def run() -> LongAnswer:
        async with serving(server) as url:
            return await asyncio.to_thread(ask, url, ids, tokens, 30.0)

    return asyncio.run(run())


def test_all_contenders_have_the_same_local_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    args = Namespace(
        model_path=str(tmp_path),
        device="cuda",
        local_tokens=32768,
        window_tokens=262000,
        page_size=16,
        kv_number_bytes=2,
    )
    sizes = bench_max_context.sizes_of(args)
    assert sizes.window_tokens == 262144, "whole pages of 2 MiB in each layer's K and V"
    assert (sizes.regular_tokens + 16) % 1024 == 0
    token_layer_bytes = 4096
    local = sizes.regular_tokens * 36 + 2 * sizes.window_tokens
    assert local * token_layer_bytes <= 32768 * 36 * token_layer_bytes
    assert sizes.total_tokens > 8 * 32768
    assert f"--max-total-tokens {sizes.regular_tokens} " in sizes.flags("swiftcache", "32")
    assert sizes.flags("stock", "32") == "--max-total-tokens 32768"


def test_prompts_are_the_same_for_every_server() -> None:
    assert prompt_ids(50, 3, 500) == prompt_ids(50, 3, 500)
    assert prompt_ids(50, 3, 500) != prompt_ids(50, 4, 500)
    assert all(0 <= number < 500 for number in prompt_ids(1000, 1, 500))


def test_an_answer_is_read_token_by_token() -> None:
    ids = [11, 12, 13]
    answer = ask_fake(FakeServer(), ids, 6)
    assert answer.error is None
    assert list(answer.output_ids) == answer_ids(ids, 6)
    assert answer.ttft_ms > 0


@pytest.mark.parametrize("fault", ["refuse", "error", "abort"])
def test_a_prompt_that_is_not_served_is_told(fault: str) -> None:
    answer = ask_fake(FakeServer(fault=lambda number, body: fault), [1, 2], 4)
    assert answer.error
    assert answer.output_ids == ()


def test_answers_are_compared_up_to_where_they_part() -> None:
    right = LongAnswer(9, None, (1, 2, 3, 4), (-0.1, -0.2, -0.3, -0.4))
    mine = LongAnswer(9, None, (1, 2, 9, 4), (-0.1, -0.25, -9.0, -0.4))
    agreement = compare(mine, right)
    assert (agreement.same_tokens, agreement.of_tokens) == (2, 4)
    assert agreement.largest_logprob_difference == pytest.approx(0.05)
    assert not agreement.complete
    assert compare(right, right).complete
