"""Model families whose KV the tier does not cover, refused by name."""

from __future__ import annotations

from typing import Any

from sglang.srt.swiftcache import donate_checks
from swiftcache_tier.errors import SwiftCacheError


def refuse_uncovered_model(server_args: Any) -> None:
    """ServerArgs._handle_model_specific_adjustments: before SGLang adjusts itself to the model."""
    flag = "--swiftcache-donors" if server_args.swiftcache_donors is not None else None
    flag = "--swiftcache-donate" if donate_checks.is_on(server_args) else flag
    if flag is not None:
        check_model(server_args.get_model_config(), flag)


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
