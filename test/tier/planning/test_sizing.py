"""R, W, K_i, N_LSC and N_RC against what they are defined by."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.blocks import KVFormat
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.stream.sizing import stream_sizes

GIB = 1 << 30
QWEN3_32B = KVFormat(layers=64, kv_heads=8, head_dim=128)

formats = st.builds(
    KVFormat,
    layers=st.integers(3, 128),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([64, 128]),
    page_tokens=st.sampled_from([1, 16, 64]),
)


def local_bytes(kv: KVFormat, regular_tokens: int, window_tokens: int) -> int:
    """R*L*b + 2*W*b, b being a token's bytes in one layer."""
    of_token = kv.layer_page_bytes // kv.page_tokens
    return (regular_tokens * kv.layers + 2 * window_tokens) * of_token


def test_qwen3_32b_with_20_gib_of_its_own_and_40_of_a_donor() -> None:
    sizes = stream_sizes(20 * GIB, [40 * GIB], QWEN3_32B)
    assert sizes.donor_blocks == (10240,)
    assert sizes.n_lsc == 10240
    assert sizes.n_rc == (20 * GIB - 10240 * 2 * 64 * 1024) // (64 * 64 * 1024)
    assert (sizes.regular_tokens, sizes.window_tokens) == (sizes.n_rc * 16, 10240 * 16)


@given(
    formats,
    st.integers(1, 8 * GIB),
    st.lists(st.integers(0, 8 * GIB), min_size=1, max_size=4),
    st.none() | st.integers(1, 1_000_000),
)
def test_the_sizes_use_what_there_is_and_no_more(
    kv: KVFormat, local: int, donated: list[int], window: int | None
) -> None:
    held = sum(size // kv.page_bytes for size in donated) * kv.page_tokens
    asked = local // 2 // (2 * kv.layer_page_bytes) * kv.page_tokens
    if window is not None:
        asked = -(-window // kv.page_tokens) * kv.page_tokens
    if local_bytes(kv, kv.page_tokens, min(held, asked)) > local:
        with pytest.raises(SwiftCacheError):
            stream_sizes(local, donated, kv, window)
        return
    sizes = stream_sizes(local, donated, kv, window)
    used = local_bytes(kv, sizes.regular_tokens, sizes.window_tokens)
    assert local - kv.page_bytes < used <= local
    assert sizes.n_lsc <= sum(sizes.donor_blocks)
    for blocks, size in zip(sizes.donor_blocks, donated, strict=True):
        assert blocks * kv.page_bytes <= size < (blocks + 1) * kv.page_bytes
    if window is not None:
        assert sizes.window_tokens < window + kv.page_tokens


@given(formats, st.integers(1, 1000), st.integers(1, 1000))
def test_a_window_that_leaves_no_regular_page_is_refused(
    kv: KVFormat, blocks: int, more: int
) -> None:
    window = blocks * 2 * kv.layer_page_bytes
    with pytest.raises(SwiftCacheError, match="no regular page"):
        stream_sizes(
            window + kv.page_bytes - 1,
            [(blocks + more) * kv.page_bytes],
            kv,
            blocks * kv.page_tokens,
        )
    sizes = stream_sizes(
        window + kv.page_bytes, [blocks * kv.page_bytes], kv, blocks * kv.page_tokens
    )
    assert (sizes.n_rc, sizes.n_lsc) == (1, blocks)
