"""Models by name and by folder, as they are typed after `--receiver` and `--donor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.blocks import KVFormat
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.models import parse_model

QWEN3_8B = KVFormat(layers=36, kv_heads=8, head_dim=128)


def folder(tmp_path: Path, **config: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("name", ["Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"])
def test_a_known_model_by_the_names_it_goes_by(name: str) -> None:
    assert parse_model(name).kv == QWEN3_8B


def test_variants_with_their_number_keep_their_size() -> None:
    assert parse_model("meta-llama/Llama-3.1-70B-Instruct").kv.layers == 80
    assert parse_model("mistralai/Mistral-7B-Instruct-v0.3").kv.layers == 32
    with pytest.raises(SwiftCacheError, match="not known"):
        parse_model("Qwen3-80B")


def test_how_it_is_served_changes_its_pages() -> None:
    kv = parse_model("Qwen3-8B,page=64,kv=fp8,tp=2").kv
    assert kv == KVFormat(36, 8, 128, dtype_bytes=1, page_tokens=64, tp_size=2)
    assert kv.page_bytes == QWEN3_8B.page_bytes


def test_a_model_knows_its_longest_context(tmp_path: Path) -> None:
    assert parse_model("Qwen3-8B,kv=fp8").context_tokens == 40960
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    assert parse_model(folder(tmp_path, **config)).context_tokens is None
    config["max_position_embeddings"] = 8192
    assert parse_model(folder(tmp_path, **config)).context_tokens == 8192
    assert parse_model(folder(tmp_path, text_config=config)).context_tokens == 8192


def test_a_folder_is_read_and_wins_over_a_name(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    assert parse_model(folder(tmp_path, **config)).kv == KVFormat(4, 8, 64)
    config |= {"num_key_value_heads": 2, "head_dim": 32}
    assert parse_model(folder(tmp_path, text_config=config)).kv == KVFormat(4, 2, 32)
    named = tmp_path / "Qwen3-8B"
    named.mkdir()
    assert parse_model(folder(named, **config)).kv == KVFormat(4, 2, 32)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 4, "kv_lora_rank": 512}, "plain attention KV"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "plain attention KV"),
        ({"num_hidden_layers": 4}, "num_key_value_heads"),
    ],
)
def test_a_folder_that_has_no_plain_kv_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(SwiftCacheError, match=words):
        parse_model(folder(tmp_path, **config))


def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwiftCacheError, match=r"cannot read .*config\.json"):
        parse_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SwiftCacheError, match="no JSON object"):
        parse_model(str(tmp_path))


@pytest.mark.parametrize("option", ["page=0", "page=-1", "kv=int3", "colour=red", "tp", ""])
def test_an_option_that_is_not_known_is_refused_by_name(option: str) -> None:
    with pytest.raises(SwiftCacheError, match=f"{option!r} is not known: expected page=TOKENS"):
        parse_model(f"Qwen3-8B,{option}")
