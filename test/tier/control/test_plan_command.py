"""`swiftcache plan`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def plan(swiftcache: Any) -> Any:
    """`swiftcache plan` with extents of the size that users get."""
    return lambda *words: swiftcache("plan", *words, env={"SWIFTCACHE_EXTENT_BYTES": "32MiB"})


def test_a_plan_of_two_kinds_of_donor(plan: Any) -> None:
    words = ["--receiver", "Qwen3-32B", "--memory", "20GiB"]
    words += ["--donor", "Qwen3-8B=40GiB", "--donor", "host=8GiB", "--layer-stream", "65536"]
    document = json.loads(plan(*words, "--json").stdout)
    engine, host = document["donors"]
    assert engine["meu"] == {"unit_bytes": 36 << 20, "receiver_pages": 9, "donor_pages": 16}
    assert (engine["extents"], engine["K_i"], engine["waste_bytes"]) == (1137, 10233, 0)
    assert (engine["exact_extent_bytes"], host["exact_extent_bytes"]) == (36 << 20, 32 << 20)
    assert (host["extent_bytes"], host["meu"], host["K_i"]) == (32 << 20, None, 2048)
    assert (document["N_LSC"], document["W"]) == (4096, 65536)
    # In 20 GiB of which the window takes 512 MiB: R * L * b + 2 * W * b, and 64 bytes a slot.
    in_regular = document["R"] * ((256 << 10) + 64)
    in_window = document["W"] * ((8 << 10) + 64)
    assert 0 <= (20 << 30) - in_regular - in_window < 2 * 1024 * (256 << 10)
    assert document["N_RC"] == document["R"] // 16
    assert document["prefix_tokens"] == (10233 + 2048 - 4096) * 16
    text = plan(*words).stdout
    for shown in (
        "Qwen3-8B",
        "36 MiB (9 blocks = 16 pages)",
        f"R = {document['R']}, W = 65536",
        "N_LSC = min(sum K_i = 12281, W = 4096) = 4096 blocks",
        f"N_RC = {document['N_RC']} blocks",
    ):
        assert shown in text


def test_auto_takes_no_window_that_no_context_asks_for(plan: Any) -> None:
    words = ["--receiver", "Qwen3-32B", "--memory", "20GiB", "--donor", "Qwen3-8B=40GiB", "--json"]
    short = json.loads(plan(*words, "--context", "40960").stdout)
    assert (short["W"], short["N_LSC"]) == (0, 0)
    long = json.loads(plan(*words, "--context", "131072").stdout)
    assert long["R"] + long["W"] > long["resident_tokens"] == short["R"]


def test_a_window_that_is_not_worth_having_is_not_planned(plan: Any) -> None:
    words = ["--receiver", "Qwen3-32B", "--memory", "20GiB", "--donor", "host=8GiB"]
    document = json.loads(plan(*words, "--json").stdout)
    assert (document["R"], document["W"], document["N_LSC"]) == (81920, 0, 0)
    assert (document["resident_tokens"], document["N_RC"]) == (81920, 5120)
    assert document["prefix_tokens"] == 2048 * 16
    text = plan(*words).stdout
    assert "auto: not worth a window: R = 81920, W = 0" in text
    assert "times as long" not in text


def test_a_plan_without_a_layer_stream(plan: Any) -> None:
    # auto would take a window here
    words = ["--receiver", "Qwen3-8B", "--memory", "3GiB", "--donor", "host=40GiB"]
    document = json.loads(plan(*words, "--json", "--layer-stream", "off").stdout)
    assert document["W"] == 0
    assert document["R"] == document["resident_tokens"]
    assert "layer stream off: R = " in plan(*words, "--layer-stream", "off").stdout


def test_the_longest_context_is_the_models_own_unless_told(plan: Any, tmp_path: Path) -> None:
    words = ["--memory", "3GiB", "--donor", "host=40GiB", "--json"]
    own = json.loads(plan("--receiver", "Qwen3-8B", *words).stdout)
    assert 40960 <= own["R"] + own["W"] < 40960 + 2 * 1024
    longer = json.loads(plan("--receiver", "Qwen3-8B", *words, "--context", "131072").stdout)
    assert longer["R"] + longer["W"] >= 131072
    config = {"num_hidden_layers": 36, "num_attention_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    silent = plan("--receiver", str(tmp_path), *words)
    assert silent.returncode == 2
    assert "no max_position_embeddings" in silent.stderr
    assert "--context TOKENS" in silent.stderr
    told = plan("--receiver", str(tmp_path), *words, "--context", "40960")
    assert json.loads(told.stdout)["R"] == own["R"]


def test_pairs_of_chosen_models(plan: Any) -> None:
    text = plan("--pairs", "Qwen3-8B", "Qwen3-32B").stdout
    assert "| **4** | 36 (9/16) | 4 (1/1) |" in text
    assert "Llama" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["--receiver", "--pairs"]),
        (["--pairs", "Qwen3-8B,page=3"], ["page=3'", "power of two"]),
        (["--pairs", "Qwen3-8B,tp=999"], ["tp=999'", "8 KV heads", "999 ranks"]),
        (["--receiver", "Qwen3-8B"], ["--memory"]),
        (["--receiver", "Qwen9", "--memory", "1GiB", "--donor", "host=1GiB"], ["'Qwen9'"]),
        (["--receiver", "Qwen3-8B", "--memory", "1GiB", "--donor", "toaster"], ["'toaster'"]),
        (["--receiver", "Qwen3-8B", "--memory", "1GiB", "--donor", "X=1GiB"], ["'X=1GiB'"]),
        (["--receiver", "Qwen3-8B", "--memory", "1GiB", "--donor", "Qwen3-8B=1MiB"], ["36 MiB"]),
        (
            ["--receiver", "Qwen3-8B", "--memory", "1MiB", "--donor", "host=1GiB"],
            ["too little", "142 MiB", "--memory"],
        ),
        (
            ["--receiver=Qwen3-8B", "--memory=160MiB", "--donor=host=1GiB", "--layer-stream=8192"],
            ["layer window of 8192 tokens", "at most 2048 tokens"],
        ),
        (
            ["--receiver", "Qwen3-32B,page=512", "--memory", "1GiB", "--donor", "host=64MiB"],
            ["no block of 128 MiB", "--page-size"],
        ),
        (
            ["--receiver=Qwen3-8B", "--memory=4GiB", "--donor=host=64MiB", "--layer-stream=8192"],
            ["window of 8192 tokens", "more donors"],
        ),
        (
            ["--receiver", "Qwen3-8B", "--memory=1GiB", "--donor=host=1GiB", "--layer-stream=x"],
            ["'x'", "expected off, auto or TOKENS"],
        ),
        (
            ["--receiver", "Qwen3-8B", "--memory=1GiB", "--donor=host=1GiB", "--layer-stream=0"],
            ["'0'", "TOKENS over 0"],
        ),
        (
            ["--receiver=Qwen3-8B", "--memory=1MiB", "--donor=host=1GiB", "--layer-stream=off"],
            ["1 MiB", "not one block of 2.3 MiB", "--memory"],
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(
    plan: Any, words: list[str], said: list[str]
) -> None:
    done = plan(*words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    for word in said:
        assert word in done.stderr
