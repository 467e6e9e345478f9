"""The byte offsets inside a block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_kernel import BlockLayout

SIZES = st.integers(1, 300)


@given(SIZES, SIZES, SIZES, SIZES)
def test_runs_tile_the_block_in_order(layers: int, page: int, k_token: int, v_token: int) -> None:
    layout = BlockLayout(layers, page, k_token, v_token)
    position = 0
    for layer in range(layers):
        assert layout.k_offset(layer) == position
        position += page * k_token
        assert layout.v_offset(layer) == position
        position += page * v_token
        assert position == (layer + 1) * layout.layer_bytes
    assert layout.block_bytes == position


@given(SIZES, SIZES, SIZES, SIZES)
def test_alignment_divides_every_run(layers: int, page: int, k_token: int, v_token: int) -> None:
    layout = BlockLayout(layers, page, k_token, v_token)
    offsets = [layout.k_offset(layers - 1), layout.v_offset(layers - 1), layout.block_bytes]
    assert all(offset % layout.alignment_bytes == 0 for offset in offsets)
    assert layout.alignment_bytes in (1, 2, 4, 8, 16)


def test_a_known_model() -> None:
    # Qwen3-8B: 36 layers, 8 KV heads of 128, bf16, pages of 16 tokens: 2.25 MiB.
    layout = BlockLayout(layers=36, page_tokens=16, k_token_bytes=2048, v_token_bytes=2048)
    assert layout.layer_bytes == 64 * 1024
    assert layout.block_bytes == 2304 * 1024
    assert layout.alignment_bytes == 16


@pytest.mark.parametrize("field", ["layers", "page_tokens", "k_token_bytes", "v_token_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_each_field_must_be_a_positive_int(field: str, value: object) -> None:
    sizes = {"layers": 1, "page_tokens": 1, "k_token_bytes": 1, "v_token_bytes": 1}
    with pytest.raises(ValueError, match=rf"^BlockLayout\.{field} must be a positive int") as error:
        BlockLayout(**{**sizes, field: value})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
