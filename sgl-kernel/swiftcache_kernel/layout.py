"""The bytes of one donor block: `block[layer][k|v][token][head][dim]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# The widest access that one GPU thread makes; more alignment than this buys nothing.
MAX_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class BlockLayout:
    """Where each layer's K and V lie inside a block. One block holds one page of the KV pool.

    layers:         layers in a block.
    page_tokens:    tokens in a block, equal to the pool's page size.
    k_token_bytes:  bytes of one token's K in one layer (heads * head_dim * itemsize).
    v_token_bytes:  the same for V; may differ from K's.

    Raises ValueError if a field is not a positive int.
    """

    layers: int
    page_tokens: int
    k_token_bytes: int
    v_token_bytes: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"BlockLayout.{field.name} must be a positive int, got {value!r}")

    @property
    def k_bytes(self) -> int:
        """Bytes of the contiguous run that holds one layer's K."""
        return self.page_tokens * self.k_token_bytes

    @property
    def v_bytes(self) -> int:
        """Bytes of the contiguous run that holds one layer's V; it follows K's."""
        return self.page_tokens * self.v_token_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, K and V together."""
        return self.k_bytes + self.v_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return self.layers * self.layer_bytes

    @property
    def alignment_bytes(self) -> int:
        """Largest power of two, at most 16, that divides the offset and length of every run."""
        return math.gcd(MAX_ALIGNMENT_BYTES, self.k_bytes, self.v_bytes)

    def k_offset(self, layer: int) -> int:
        """Bytes from a block's first byte to the K run of `layer`."""
        return layer * self.layer_bytes

    def v_offset(self, layer: int) -> int:
        """Bytes from a block's first byte to the V run of `layer`."""
        return layer * self.layer_bytes + self.k_bytes
