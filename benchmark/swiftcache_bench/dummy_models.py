"""Model folders with the shapes of real models and no weights, for `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path

from swiftcache_bench.errors import BenchmarkError
from swiftcache_tier.models import KNOWN_MODELS

VOCAB = 151936
CONTEXT_TOKENS = 262_144

# (hidden size, intermediate size, attention heads), as in the models' own config.json.
_SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 16),
    "Qwen3-8B": (4096, 12288, 32),
    "Qwen3-14B": (5120, 17408, 40),
    "Qwen3-32B": (5120, 25600, 64),
}


def write_dummy_model(name: str, folder: Path) -> Path:
    """Write config.json and generation_config.json of `name`; returns `folder`.

    Raises BenchmarkError for a model whose shapes are not known here.
    """
    if name not in _SHAPES:
        raise BenchmarkError(f"no shapes of {name!r}: expected any of {', '.join(_SHAPES)}")
    hidden, intermediate, heads = _SHAPES[name]
    kv = KNOWN_MODELS[name].kv
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": kv.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv.kv_heads,
        "head_dim": kv.head_dim,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
        "pad_token_id": 151643,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": 151645, "pad_token_id": 151643}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
