"""KV formats of models: the sizes people serve by name, any other from its config.json."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from swiftcache_tier.blocks.kv_format import KVFormat, is_power_of_two
from swiftcache_tier.errors import SwiftCacheError


class KnownModel(NamedTuple):
    """The KV format of a model and the longest context that its configuration states."""

    kv: KVFormat
    context_tokens: int


KNOWN_MODELS = {
    "Qwen3-0.6B": KnownModel(KVFormat(layers=28, kv_heads=8, head_dim=128), 40960),
    "Qwen3-1.7B": KnownModel(KVFormat(layers=28, kv_heads=8, head_dim=128), 40960),
    "Qwen3-4B": KnownModel(KVFormat(layers=36, kv_heads=8, head_dim=128), 40960),
    "Qwen3-8B": KnownModel(KVFormat(layers=36, kv_heads=8, head_dim=128), 40960),
    "Qwen3-14B": KnownModel(KVFormat(layers=40, kv_heads=8, head_dim=128), 40960),
    "Qwen3-32B": KnownModel(KVFormat(layers=64, kv_heads=8, head_dim=128), 40960),
    "Qwen3-30B-A3B": KnownModel(KVFormat(layers=48, kv_heads=4, head_dim=128), 40960),
    "Qwen3-235B-A22B": KnownModel(KVFormat(layers=94, kv_heads=4, head_dim=128), 40960),
    "Llama-3.2-1B": KnownModel(KVFormat(layers=16, kv_heads=8, head_dim=64), 131072),
    "Llama-3.2-3B": KnownModel(KVFormat(layers=28, kv_heads=8, head_dim=128), 131072),
    "Llama-3.1-8B": KnownModel(KVFormat(layers=32, kv_heads=8, head_dim=128), 131072),
    "Llama-3.1-70B": KnownModel(KVFormat(layers=80, kv_heads=8, head_dim=128), 131072),
    "Llama-3.1-405B": KnownModel(KVFormat(layers=126, kv_heads=8, head_dim=128), 131072),
    "Mistral-7B": KnownModel(KVFormat(layers=32, kv_heads=8, head_dim=128), 32768),
    "Mistral-Nemo-12B": KnownModel(KVFormat(layers=40, kv_heads=8, head_dim=128), 131072),
    "Mistral-Small-24B": KnownModel(KVFormat(layers=40, kv_heads=8, head_dim=128), 32768),
    "Mistral-Large-123B": KnownModel(KVFormat(layers=88, kv_heads=8, head_dim=128), 131072),
    "Mixtral-8x7B": KnownModel(KVFormat(layers=32, kv_heads=8, head_dim=128), 32768),
    "Mixtral-8x22B": KnownModel(KVFormat(layers=56, kv_heads=8, head_dim=128), 65536),
}
"""In bf16, pages of 16 tokens, one rank. A later variant's context may be longer."""

MODEL_FORMS = (
    "a name such as Qwen3-8B or a folder with a config.json, then if need be ,page=64 ,kv=fp8 or "
    ",tp=2"
)

_KV_BYTES = {"fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
# What follows the size in names of trained variants: Qwen3-8B-Base, Llama-3.1-8B-Instruct.
_VARIANT = re.compile(r"-(base|instruct|fp8|awq|v[0-9.]+|[0-9]{4})\b.*", re.IGNORECASE)


class NamedModel(NamedTuple):
    """A model as the user wrote it, without what changes its format, and that format."""

    name: str
    kv: KVFormat
    context_tokens: int | None
    """The longest context; None if its configuration does not say."""


def parse_model(text: str) -> NamedModel:
    """The model that `text` names: `NAME_OR_FOLDER[,page=TOKENS][,kv=DTYPE][,tp=RANKS]`.

    Raises SwiftCacheError for a name that is not known, a folder that has no readable
    configuration, a model that keeps other KV than every layer's heads alike, or a bad option.
    """
    name, *options = text.split(",")
    if not name.strip():
        raise SwiftCacheError(f"model {text!r} has no name: expected {MODEL_FORMS}")
    kv, context_tokens = _known(name) or _from_folder(name)
    for option in options:
        kv = _with_option(kv, text, option)
    return NamedModel(name, kv, context_tokens)


def _known(name: str) -> KnownModel | None:
    """Hub names count too, with their owner and variant: Qwen/Qwen3-8B-Base."""
    if Path(name).is_dir():
        return None
    wanted = name.rpartition("/")[2].lower()
    names = {known.lower(): model for known, model in KNOWN_MODELS.items()}
    return names.get(wanted) or names.get(_VARIANT.sub("", wanted))


def _from_folder(name: str) -> tuple[KVFormat, int | None]:
    folder = Path(name)
    if not folder.is_dir():
        raise SwiftCacheError(
            f"model {name!r} is not known: expected {MODEL_FORMS}; known are "
            f"{', '.join(KNOWN_MODELS)}"
        )
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_bytes())
    except (OSError, ValueError) as error:
        raise SwiftCacheError(
            f"cannot read {config_path} ({error}): name a model's folder"
        ) from None
    if not isinstance(config, dict):
        raise SwiftCacheError(f"{config_path} holds no JSON object: name a model's folder")
    config = config.get("text_config") or config
    return _from_config(config_path, config), config.get("max_position_embeddings")


def _from_config(config_path: Path, config: dict[str, Any]) -> KVFormat:
    if config.get("kv_lora_rank") or set(config.get("layer_types") or ()) - {"full_attention"}:
        raise SwiftCacheError(
            f"{config_path} is of a model whose layers do not all keep plain attention KV: donor "
            f"memory is for multi-head and grouped-query attention alone; name another model"
        )
    heads = config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else None)
    kv_heads = config.get("num_key_value_heads") or heads
    layers = config.get("num_hidden_layers")
    if not (isinstance(layers, int) and isinstance(kv_heads, int) and isinstance(head_dim, int)):
        raise SwiftCacheError(
            f"{config_path} does not say num_hidden_layers, num_key_value_heads and head_dim: "
            f"name the folder of a language model"
        )
    return KVFormat(layers, kv_heads, head_dim)


def _with_option(kv: KVFormat, text: str, option: str) -> KVFormat:
    key, _, value = option.strip().partition("=")
    if key == "kv" and value in _KV_BYTES:
        return replace(kv, dtype_bytes=_KV_BYTES[value])
    if key in ("page", "tp") and value.isdecimal() and int(value) > 0:
        tokens_or_ranks = int(value)
        if key == "page":
            if not is_power_of_two(tokens_or_ranks):
                raise SwiftCacheError(
                    f"model {text!r}: servers take no pages of {value} tokens: expected a power of "
                    f"two, such as page=16"
                )
            return replace(kv, page_tokens=tokens_or_ranks)
        # Heads are divided among ranks, or, where there are fewer, each is kept by as many.
        if kv.kv_heads % tokens_or_ranks and tokens_or_ranks % kv.kv_heads:
            raise SwiftCacheError(
                f"model {text!r}: {kv.kv_heads} KV heads cannot be divided over {value} ranks: "
                f"expected a number that divides them, or a multiple of them"
            )
        return replace(kv, tp_size=tokens_or_ranks)
    raise SwiftCacheError(
        f"model {text!r}: {option!r} is not known: expected page=TOKENS, tp=RANKS or kv= one of "
        f"{', '.join(_KV_BYTES)}"
    )
