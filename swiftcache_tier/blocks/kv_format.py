"""The bytes of a model's KV: what of it decides how large a page is, whoever serves it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from swiftcache_tier.errors import SwiftCacheError


@dataclass(frozen=True)
class KVFormat:
    """Plain multi-head or grouped-query KV, the same in every layer, with heads of one size.

    `dtype_bytes` of one element of the KV cache (2 for bf16 and fp16, 1 for fp8). `page_tokens` is
    the server's page size, `tp_size` over how many ranks the heads are divided: sizes are those of
    one rank, which keeps one head at least. Raises SwiftCacheError for what is not positive.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    page_tokens: int = 16
    tp_size: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise SwiftCacheError(f"{field.name} of a KV format is {value}: expected 1 or more")

    @property
    def layer_page_bytes(self) -> int:
        """K and V of one page in one layer: the paper's M_block, 2 * B * H * D * dtype."""
        heads = max(1, self.kv_heads // self.tp_size)
        return 2 * self.page_tokens * heads * self.head_dim * self.dtype_bytes

    @property
    def page_bytes(self) -> int:
        """A page in all layers: one block of a receiver, one page of a page-major donor pool."""
        return self.layer_page_bytes * self.layers

    @property
    def token_bytes(self) -> int:
        """One token in all layers."""
        return self.page_bytes // self.page_tokens


def is_power_of_two(number: int) -> bool:
    """What a server's page size has to be."""
    return number > 0 and number & (number - 1) == 0
