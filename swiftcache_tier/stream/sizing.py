"""How many slots the layer window has: the formulas of the SwiftCache paper (its section 4).

With L layers, b bytes of K and V of one token in one layer, and blocks of B tokens:

    local memory    = R * L * b + 2 * W * b     (regular slots, and two sets of window slots)
    M_block         = B * b                     (one layer of one block)
    K_i             = floor(C_i / (M_block * L))   blocks that donor i can hold
    N_LSC           = min(sum of K_i, W / B)       blocks that can be streamed

R and W count tokens. All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size

_MIB = 1 << 20

WINDOW_SETS = 2
"""One for the layer that is computed, one for the layer that arrives."""

SLOT_OVERHEAD_BYTES = 64
"""SGLang's eager input buffers have a place for every slot: ids, positions, locations, masks."""

AUTO_WINDOW_SHARE_OF_LOCAL = 0.5
"""Of the local bytes, what `auto` gives the window at most."""

AUTO_WINDOW_SHARE_OF_DONATED = 0.5
"""Of the donors' blocks, what `auto` takes for the window at most: the rest holds prefixes."""


@dataclass(frozen=True)
class StreamShape:
    """What the sizes depend on. Raises ValueError for a field below 1."""

    layers: int
    token_layer_bytes: int
    """K and V of one token in one layer (b)."""
    page_tokens: int
    """Tokens of a page, which is a block of a donor (B)."""
    unit_tokens: int
    """W, and R plus the one page that SGLang pads with, are multiples of this: in each layer's K
    and V so many tokens are a whole number of the pages that memory is mapped in."""
    slot_overhead_bytes: int = 0
    """What else grows by a slot of either kind: index tables and input buffers of the engine."""

    def __post_init__(self) -> None:
        if min(self.layers, self.token_layer_bytes, self.page_tokens, self.unit_tokens) < 1:
            raise ValueError(f"{self}: all of these are 1 or more")
        if self.unit_tokens % self.page_tokens:
            raise ValueError(f"{self}: unit_tokens must be a multiple of page_tokens")

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers (L * b)."""
        return self.layers * self.token_layer_bytes

    @property
    def block_bytes(self) -> int:
        return self.page_tokens * self.token_bytes

    @property
    def regular_slot_bytes(self) -> int:
        return self.token_bytes + self.slot_overhead_bytes

    @property
    def window_slot_bytes(self) -> int:
        return WINDOW_SETS * self.token_layer_bytes + self.slot_overhead_bytes


@dataclass(frozen=True)
class StreamPlan:
    """The sizes of a pool with a window."""

    shape: StreamShape
    regular_tokens: int
    """R."""
    window_tokens: int
    """W."""
    blocks: tuple[int, ...] = ()
    """K_i, donor by donor."""

    @property
    def total_tokens(self) -> int:
        """R + W: the longest sequence."""
        return self.regular_tokens + self.window_tokens

    def is_worth_having(self, tokens_without: int) -> bool:
        """Whether contexts are longer than in a pool of so many tokens without a window.

        Slots of a window cost more than they bring where donors back few of them.
        """
        return self.total_tokens > tokens_without

    @property
    def window_pages(self) -> int:
        return self.window_tokens // self.shape.page_tokens

    @property
    def streamed_blocks(self) -> int:
        """N_LSC: window pages for which there is a donor block."""
        return min(sum(self.blocks), self.window_pages)

    @property
    def regular_bytes(self) -> int:
        return self.regular_tokens * self.shape.token_bytes

    @property
    def window_bytes(self) -> int:
        """Local memory of the window, in two sets."""
        return WINDOW_SETS * self.window_tokens * self.shape.token_layer_bytes

    @property
    def donated_bytes(self) -> int:
        """What donors must lend for the whole window."""
        return self.window_tokens * self.shape.token_bytes

    def __str__(self) -> str:
        return (
            f"R {self.regular_tokens} regular tokens ({format_size(self.regular_bytes)}), "
            f"W {self.window_tokens} window tokens ({format_size(self.window_bytes)} local, "
            f"{format_size(self.donated_bytes)} of donors), "
            f"K_i {list(self.blocks)} blocks of {format_size(self.shape.block_bytes)}, "
            f"N_LSC {self.streamed_blocks}"
        )


def unit_tokens_of(granularity_bytes: int, page_tokens: int, row_bytes: tuple[int, int]) -> int:
    """The least number of tokens, whole pages of them, that fills pages of memory in both sides.

    row_bytes: of one token in one layer, K's and V's. Memory is mapped in `granularity_bytes`.
    """
    sides = (granularity_bytes // math.gcd(granularity_bytes, row) for row in row_bytes)
    return math.lcm(page_tokens, *sides)


def donor_blocks(donated_bytes: Sequence[int], shape: StreamShape) -> tuple[int, ...]:
    """K_i: whole blocks that fit in each donor's memory."""
    return tuple(size // shape.block_bytes for size in donated_bytes)


def regular_tokens_for(tokens: int, shape: StreamShape) -> int:
    """The largest R up to `tokens` that can be mapped; 0 if there is none."""
    units = (tokens + shape.page_tokens) // shape.unit_tokens
    return max(0, units * shape.unit_tokens - shape.page_tokens)


def least_regular_tokens(shape: StreamShape) -> int:
    """The least R that can be mapped."""
    return max(regular_tokens_for(shape.unit_tokens, shape), shape.page_tokens)


def window_limit_tokens(local_bytes: int, shape: StreamShape) -> int:
    """The largest W for which local memory is left for the least R that can be mapped."""
    rest = local_bytes - least_regular_tokens(shape) * shape.regular_slot_bytes
    return max(0, rest // shape.window_slot_bytes // shape.unit_tokens * shape.unit_tokens)


def plan_window(
    window_tokens: int, local_bytes: int, donated_bytes: Sequence[int], shape: StreamShape
) -> StreamPlan:
    """W as asked for, rounded up to whole units, and R from what is left of `local_bytes`.

    Raises SwiftCacheError if that leaves no regular slot.
    """
    window = -(-window_tokens // shape.unit_tokens) * shape.unit_tokens
    rest = local_bytes - window * shape.window_slot_bytes
    regular = regular_tokens_for(max(0, rest) // shape.regular_slot_bytes, shape)
    if regular == 0:
        raise _too_little(window, max(0, local_bytes), shape)
    return StreamPlan(shape, regular, window, donor_blocks(donated_bytes, shape))


def plan_auto(
    local_bytes: int, donated_bytes: Sequence[int], context_tokens: int, shape: StreamShape
) -> StreamPlan:
    """The window that `auto` takes.

    As much as donors can back with `AUTO_WINDOW_SHARE_OF_DONATED` of their blocks, as the model's
    context asks for beyond the regular slots, and as `AUTO_WINDOW_SHARE_OF_LOCAL` pays for:
    whichever is least. W may be 0; then the plan is that of a pool without a window.
    """
    blocks = donor_blocks(donated_bytes, shape)
    backed = int(sum(blocks) * AUTO_WINDOW_SHARE_OF_DONATED) * shape.page_tokens
    paid = int(local_bytes * AUTO_WINDOW_SHARE_OF_LOCAL) // shape.window_slot_bytes
    # beyond a whole context there is no request; each window token costs regular ones
    wanted = _window_for(context_tokens, local_bytes, shape)
    window = min(backed, paid, wanted) // shape.unit_tokens * shape.unit_tokens
    window = min(window, window_limit_tokens(local_bytes, shape))
    return plan_window(window, local_bytes, donated_bytes, shape)


def _window_for(context_tokens: int, local_bytes: int, shape: StreamShape) -> int:
    """The whole units of W with which R + W is `context_tokens` or more."""
    if regular_tokens_for(local_bytes // shape.regular_slot_bytes, shape) >= context_tokens:
        return 0
    # R loses less than a unit to its own rounding
    total_tokens = context_tokens + shape.unit_tokens
    window = total_tokens - _regular_beside(total_tokens, local_bytes, shape)
    return -(-window // shape.unit_tokens) * shape.unit_tokens


def _regular_beside(total_tokens: int, local_bytes: int, shape: StreamShape) -> int:
    """R of the pool in which R + W is `total_tokens` and all of `local_bytes` is used."""
    gain = shape.regular_slot_bytes - shape.window_slot_bytes
    if gain <= 0:
        return total_tokens
    return min(total_tokens, max(0, local_bytes - total_tokens * shape.window_slot_bytes) // gain)


def _too_little(window_tokens: int, local_bytes: int, shape: StreamShape) -> SwiftCacheError:
    more = "(--mem-fraction-static, in a plan --memory)"
    limit = window_limit_tokens(local_bytes, shape)
    if window_tokens and limit:
        return SwiftCacheError(
            f"a layer window of {window_tokens} tokens takes "
            f"{format_size(window_tokens * shape.window_slot_bytes)} and leaves no regular slots "
            f"of {format_size(local_bytes)} for KV: ask for at most {limit} tokens, or give KV "
            f"more memory {more}"
        )
    window = min(window_tokens, shape.unit_tokens)
    regular = least_regular_tokens(shape)
    least = regular * shape.regular_slot_bytes + window * shape.window_slot_bytes
    beside = f" and a layer window of {window}" if window else ""
    return SwiftCacheError(
        f"{format_size(local_bytes)} for KV is too little: the least of this model that can be "
        f"mapped, {regular} regular tokens{beside}, takes {-(-least // _MIB)} MiB; give KV so much "
        f"or more {more}"
    )
