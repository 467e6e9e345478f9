"""What of a model must hold for its layers to be streamed."""

from __future__ import annotations

from typing import Any

from swiftcache_tier.errors import SwiftCacheError


def check_layers(model: Any, layers: int) -> None:
    """Require one attention layer for each of 0 .. layers - 1. ``model``: a torch module.

    The window holds one layer at a time, so a layer that reads another one's KV, as KV-sharing
    models do, would read the wrong bytes.

    Raises SwiftCacheError, one line.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = sorted(m.layer_id for m in model.modules() if isinstance(m, RadixAttention))
    if found != list(range(layers)):
        raise SwiftCacheError(
            f"--swiftcache-layer-stream needs one attention layer for each of 0 to {layers - 1}, "
            f"{type(model).__name__} has {len(found)} for {len(set(found))} of them: serve this "
            "model without the flag"
        )
