"""The longest-prompt benchmark: its sizes, and what it makes of answers."""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark.conftest import BENCHMARK
from benchmark.fake_server import FakeServer, answer_ids
from benchmark.serving import serving

from support.processes import free_port
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.long_prompts import LongAnswer, ask, compare, prompt_ids
from swiftcache_tier.stream import StreamShape

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


FAKE_SGLANG = Path(__file__).resolve().parent / "fake_sglang"
SIZES = bench_max_context.Sizes(1000, 800, StreamShape(4, 64, 16, 16), 500)


def beside(server: FakeServer, work: Callable[[str], Any]) -> Any:
    """What `work` returns, which is given the URL of the server that runs beside it."""

    async def run() -> Any:
        async with serving(server) as url:
            return await asyncio.to_thread(work, url)

    return asyncio.run(run())


def ask_fake(server: FakeServer, ids: list[int], tokens: int) -> LongAnswer:
    answer: LongAnswer = beside(server, lambda url: ask(url, ids, tokens, 30.0))
    return answer


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


def result(*answers: LongAnswer, **more: Any) -> dict[str, Any]:
    """What `measure` leaves in a file."""
    nothing = {"residents": None, "memory": {"kvcache": 1.5, "weight": 0.25}}
    found = {"answers": [a.as_json() for a in answers], "streamed": [(0, 0.0)] * len(answers)}
    return found | nothing | more


@pytest.fixture
def reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is printed of these results."""

    def report(**results: dict[str, Any]) -> str:
        for name, found in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(found))
        bench_max_context.report(SIZES, tmp_path)
        return capsys.readouterr().out

    return report


def served(length: int, *ids: int) -> LongAnswer:
    return LongAnswer(length, None, ids, (-1.0,) * len(ids), 10.0, 2.0)


def test_an_answer_that_parts_from_the_reference_was_not_served(
    reported: Callable[..., str],
) -> None:
    text = reported(
        reference=result(served(500, 1, 2, 3), served(8000, 4, 5, 6)),
        swiftcache=result(served(500, 1, 2, 3), served(8000, 4, 9, 9)),
        stock=result(served(500, 1, 2, 3), LongAnswer(8000, "too long")),
    )
    assert "swiftcache: 500 tokens at most, 0.50 of local" in text
    assert "| swiftcache | 8000 | 8.00 | 1 of 3 tokens the same" in text
    assert "stock: 500 tokens at most" in text
    assert "| stock | 8000 | 8.00 | no: too long |" in text
    assert "reference: 8000 tokens at most, 8.00 of local" in text


@pytest.mark.parametrize("reference", [{}, {"reference": result(LongAnswer(8000, "no answer"))}])
def test_without_a_reference_nothing_counts_as_right(
    reported: Callable[..., str], reference: dict[str, Any]
) -> None:
    text = reported(swiftcache=result(served(8000, 1, 2)), **reference)
    assert "| swiftcache | 8000 | 8.00 | not checked |" in text
    assert "swiftcache: 0 tokens at most" in text


def test_the_memory_in_use_and_the_residents_are_reported(reported: Callable[..., str]) -> None:
    right = result(served(500, 1), residents={"tpot_joined_ms": 4.0})
    mine = result(
        served(500, 1),
        residents={"tpot_joined_ms": 5.0},
        streamed=[(3_000_000_000, 8.0)],
        memory={"kvcache": 1.586, "weight": 15.269},
    )
    text = reported(reference=right, swiftcache=mine)
    assert "swiftcache, memory in use on the device: 1.586 GiB of KV, 15.269 of weights" in text
    assert "swiftcache, joined, against all slots regular: 1.250" in text
    assert "| 2.00 | 3.00 | 0.250 |" in text, "the floor is the time of the bytes"


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Of a small run, whose servers are fakes."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_8B))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_SGLANG))
    argv = ["bench", "--model-path", str(tmp_path), "--device", "cpu", "--port", str(free_port())]
    argv += ["--local-tokens", "1000", "--window-tokens", "1600", "--output-dir", str(tmp_path)]
    argv += ["--only", "reference", "stock", "--factors", "0.5", "--output-tokens", "5"]
    argv += ["--residents", "2", "--resident-output", "3", "--joining-tokens", "64"]
    monkeypatch.setattr(sys, "argv", argv)
    return bench_max_context.parse_args()


def test_contenders_are_asked_in_turn_and_their_answers_kept(
    args: Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_max_context.run(args) == 0
    sizes = bench_max_context.sizes_of(args)
    lengths = [sizes.regular_tokens // 2, sizes.total_tokens - 5 - 2 * 16]
    for name in ("reference", "stock"):
        found = json.loads((args.output_dir / f"{name}.json").read_text())
        assert [answer["length"] for answer in found["answers"]] == lengths
        for answer in found["answers"]:
            ids = sizes.prompt(answer["length"], answer["length"])
            assert answer["output_ids"] == answer_ids(ids, 5)
        assert found["residents"]["ratio"] > 0
        assert found["streamed"] == [[0, 0.0]] * 2
    text = capsys.readouterr().out
    assert f"stock: {lengths[1]} tokens at most" in text
    assert "5 of 5 tokens the same" in text


def test_residents_are_timed_alone_and_beside_a_streamed_request(args: Namespace) -> None:
    server = FakeServer()
    found = beside(server, lambda url: bench_max_context.join(url, SIZES, args))
    assert server.flushes == 2
    lengths = [len(body["input_ids"]) for body in server.bodies]
    short = SIZES.regular_tokens // 8
    long = SIZES.regular_tokens + 64
    assert lengths[:2] == [short, short]
    assert lengths[2] == long, "its prefill is over when the others decode"
    assert sorted(lengths[3:]) == [short, short, long]
    assert found["ratio"] == found["tpot_joined_ms"] / found["tpot_alone_ms"]


def test_a_resident_that_is_not_served_has_no_time(args: Namespace) -> None:
    server = FakeServer(fault=lambda number, body: "refuse" if number == 1 else None)
    with pytest.raises(BenchmarkError, match=r"beside others \d+ tokens: "):
        beside(server, lambda url: bench_max_context.join(url, SIZES, args))


def test_the_bytes_of_a_step_are_those_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = {
        "block_bytes": 32768,
        "block_tokens": 16,
        "layer_stream": {"window_slots": {"used": 1000}},
        "donors": [
            {"link_details": {"measured_gb_per_s": 2.048, "expected_gb_per_s": 9.0}},
            {"link_details": {"measured_gb_per_s": None, "expected_gb_per_s": 4.0}},
        ],
    }
    info = {"internal_states": [{"swiftcache": tier}]}
    monkeypatch.setattr(bench_max_context, "server_info", lambda url: info)
    assert bench_max_context.streamed("url") == (2_048_000, pytest.approx(1.0))
