"""A language model small enough to be made anew by a test run: Qwen3 with random weights.

The weights are random but scaled so that attention is sharp: what a model of this kind says next
depends on tokens hundreds of positions back, so a KV entry that was lost, moved or overwritten
changes the output. Written with numpy, safetensors and tokenizers alone: no import of torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[2]

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """Shape of a tiny model. One token's K and V in one layer are each ``kv_heads * head_dim``."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 512
    context: int = 8192
    experts: int = 0
    """Of each layer, two to a token (Qwen3-MoE); 0: one MLP for all (Qwen3)."""


def build_tiny_model(folder: Path, shape: TinyShape | None = None, seed: int = 0) -> Path:
    """Write a servable model (config, float32 safetensors, tokenizer, chat template) to ``folder``.

    The same shape and seed give the same bytes. Returns ``folder``.
    """
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    pad, end = _write_tokenizer(folder, shape)
    _write_config(folder, shape, pad, end)
    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_tokenizer(folder: Path, shape: TinyShape) -> tuple[int, int]:
    """Train a byte-level BPE on the licence, write it, and return the ids of (pad, end of turn)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(REPOSITORY / "LICENSE").read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": shape.context,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer.token_to_id(PAD), tokenizer.token_to_id(END)


def _write_config(folder: Path, shape: TinyShape, pad: int, end: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))


def _weights(shape: TinyShape, seed: int) -> dict[str, NDArray[np.float32]]:
    """All parameters of the model under their checkpoint names, float32."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    def ones(size: int, scale: float = 1.0) -> NDArray[np.float32]:
        return np.full(size, scale, dtype=np.float32)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": ones(shape.hidden),
        "lm_head.weight": matrix(shape.vocab, shape.hidden),
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": ones(shape.hidden),
            name + "post_attention_layernorm.weight": ones(shape.hidden),
            name + "self_attn.q_proj.weight": matrix(queries, shape.hidden),
            name + "self_attn.k_proj.weight": matrix(keys, shape.hidden),
            name + "self_attn.v_proj.weight": matrix(keys, shape.hidden),
            name + "self_attn.o_proj.weight": matrix(shape.hidden, queries),
            # Scaled queries make attention pick a few tokens instead of averaging over all.
            name + "self_attn.q_norm.weight": ones(shape.head_dim, scale=4.0),
            name + "self_attn.k_norm.weight": ones(shape.head_dim),
        }
        mlps = [f"{name}mlp."]
        if shape.experts:
            weights[f"{name}mlp.gate.weight"] = matrix(shape.experts, shape.hidden)
            mlps = [f"{name}mlp.experts.{expert}." for expert in range(shape.experts)]
        for mlp in mlps:
            weights |= {
                mlp + "gate_proj.weight": matrix(shape.intermediate, shape.hidden),
                mlp + "up_proj.weight": matrix(shape.intermediate, shape.hidden),
                mlp + "down_proj.weight": matrix(shape.hidden, shape.intermediate),
            }
    return weights
