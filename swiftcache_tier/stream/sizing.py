"""How much of a pool is regular and how much is streamed: the paper's formulas.

Regular slots have memory of their own in every layer; window slots have it in two layers at once,
and their content lies in donor blocks. Blocks are pages: M_block bytes in each of L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_tier.blocks.kv_format import KVFormat
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size

_PARITIES = 2


class StreamSizes(NamedTuple):
    """R and W in tokens, the rest in blocks: K_i of each donor, N_LSC streamed, N_RC regular."""

    regular_tokens: int
    window_tokens: int
    donor_blocks: tuple[int, ...]
    n_lsc: int
    n_rc: int


def blocks_of_donor(donated_bytes: int, kv: KVFormat) -> int:
    """K_i = floor(C_i / (M_block * L)): whole blocks that a donor's memory holds."""
    return donated_bytes // (kv.layer_page_bytes * kv.layers)


def stream_sizes(
    local_bytes: int,
    donated_bytes: Sequence[int],
    kv: KVFormat,
    window_tokens: int | None = None,
) -> StreamSizes:
    """Sizes for `local_bytes` of KV memory on the device and donors of `donated_bytes`.

    N_LSC = min(sum K_i, W), and N_RC = floor((C - 2 * N_LSC * M_block) / (M_block * L)). Without
    `window_tokens` W is all that donors hold, but no more than fits into half of the local memory.
    Raises SwiftCacheError where the window leaves no regular block.
    """
    per_donor = tuple(blocks_of_donor(size_bytes, kv) for size_bytes in donated_bytes)
    window_block_bytes = _PARITIES * kv.layer_page_bytes
    if window_tokens is None:
        window_blocks = local_bytes // 2 // window_block_bytes
    else:
        window_blocks = -(-window_tokens // kv.page_tokens)
    n_lsc = min(sum(per_donor), window_blocks)
    n_rc = (local_bytes - n_lsc * window_block_bytes) // kv.page_bytes
    if n_rc < 1:
        raise SwiftCacheError(
            f"a window of {n_lsc * kv.page_tokens} tokens takes "
            f"{format_size(n_lsc * window_block_bytes)} of {format_size(local_bytes)} and leaves "
            f"no regular page of {format_size(kv.page_bytes)}: give a smaller window or more memory"
        )
    return StreamSizes(
        n_rc * kv.page_tokens, n_lsc * kv.page_tokens, per_donor, n_lsc=n_lsc, n_rc=n_rc
    )
