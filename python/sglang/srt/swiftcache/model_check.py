"""Model families whose KV the tier does not cover, refused by name."""

from __future__ import annotations

from typing import Any

from swiftcache_tier.errors import SwiftCacheError


def check_model(config: Any, flag: str) -> None:
    """Refuse, by name, a model family that ``flag`` does not cover. ``config``: ModelConfig."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    family = None
    if config.attention_arch != AttentionArch.MHA:
        family = "latent attention (MLA)"
    elif config.is_hybrid_swa:
        family = "sliding-window attention (SWA)"
    elif mambaish_config(config) is not None:
        family = "state-space or linear attention (Mamba and the like)"
    if family is not None:
        name = (config.hf_config.architectures or ["this model"])[0]
        raise SwiftCacheError(
            f"{flag} does not cover {family}, which {name} uses: serve it without "
            "the flag, or serve a model with full MHA or GQA attention"
        )
