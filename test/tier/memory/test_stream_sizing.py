"""Sizes of a layer window: the paper's formulas, within the memory there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.stream import (
    donor_blocks,
    plan_auto,
    plan_window,
    regular_tokens_for,
    window_limit_tokens,
)
from swiftcache_tier.stream.sizing import StreamShape

GIB = 1 << 30
QWEN3_8B = StreamShape(layers=36, token_layer_bytes=4096, page_tokens=16, unit_tokens=1024)

shapes = st.builds(
    lambda layers, b, page, unit, overhead: StreamShape(layers, b, page, page * unit, overhead),
    st.integers(1, 80),
    st.integers(1, 1 << 14),
    st.sampled_from([2, 16, 64]),
    st.integers(1, 64),
    st.integers(0, 256),
)


def test_the_papers_numbers_for_qwen3_8b() -> None:
    """One block of 16 tokens is 2.25 MiB; two window slots of a layer cost an 18th of a regular."""
    assert QWEN3_8B.block_bytes == 9 * GIB // 4096
    assert donor_blocks([40 * GIB, 3 * GIB + 1], QWEN3_8B) == (18204, 1365)
    plan = plan_window(131072, 8 * GIB, [40 * GIB], QWEN3_8B)
    assert plan.window_bytes == GIB
    assert plan.donated_bytes == 18 * GIB
    assert plan.regular_tokens == regular_tokens_for(7 * GIB // (36 * 4096), QWEN3_8B)
    assert plan.streamed_blocks == plan.window_pages == 8192


def test_no_more_is_streamed_than_donors_hold() -> None:
    plan = plan_window(131072, 8 * GIB, [GIB, GIB], QWEN3_8B)
    assert plan.streamed_blocks == sum(plan.blocks) == 910


def test_a_window_that_leaves_nothing_is_refused_in_one_line() -> None:
    with pytest.raises(SwiftCacheError) as caught:
        plan_window(1 << 20, GIB, [100 * GIB], QWEN3_8B)
    line = str(caught.value)
    assert "leaves no regular slots" in line
    assert f"at most {window_limit_tokens(GIB, QWEN3_8B)} tokens" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("window", "beside"), [(0, "1008 regular tokens, "), (4096, "and a layer window of 1024, ")]
)
def test_too_little_memory_for_any_pool_says_how_much_is_enough(window: int, beside: str) -> None:
    with pytest.raises(SwiftCacheError, match="100 MiB for KV is too little") as caught:
        plan_window(window, 100 << 20, [GIB], QWEN3_8B)
    assert beside in str(caught.value)
    (enough,) = re.findall(r"takes (\d+) MiB", str(caught.value))
    least_window = min(window, QWEN3_8B.unit_tokens)
    assert plan_window(least_window, int(enough) << 20, [GIB], QWEN3_8B).regular_tokens == 1008
    with pytest.raises(SwiftCacheError):
        plan_window(least_window, int(enough) - 1 << 20, [GIB], QWEN3_8B)


@given(shapes, st.integers(0, 1 << 40), st.integers(1, 1 << 22))
def test_a_plan_keeps_to_the_local_memory_and_to_whole_units(
    shape: StreamShape, local_bytes: int, window: int
) -> None:
    try:
        plan = plan_window(window, local_bytes, [], shape)
    except SwiftCacheError:
        limit = window_limit_tokens(local_bytes, shape)
        if limit:
            assert plan_window(limit, local_bytes, [], shape).window_tokens == limit
        return
    assert plan.window_tokens >= window
    assert plan.window_tokens % shape.unit_tokens == 0
    assert plan.regular_tokens > 0
    assert (plan.regular_tokens + shape.page_tokens) % shape.unit_tokens == 0
    used = plan.regular_tokens * shape.regular_slot_bytes
    assert used + plan.window_tokens * shape.window_slot_bytes <= local_bytes


@given(
    shapes,
    st.integers(1 << 20, 1 << 38),
    st.lists(st.integers(0, 1 << 38), max_size=3),
    st.integers(1, 1 << 21),
)
def test_auto_is_backed_by_donors_and_reaches_a_context_where_it_may(
    shape: StreamShape, local_bytes: int, donated: list[int], context: int
) -> None:
    try:
        plan = plan_auto(local_bytes, donated, context, shape)
    except SwiftCacheError:
        return  # not even one unit of regular slots
    assert plan.window_pages <= sum(plan.blocks) // 2
    assert plan.streamed_blocks == plan.window_pages
    assert plan.window_tokens < context + 2 * shape.unit_tokens, "no request is longer"
    if plan.total_tokens < context and shape.window_slot_bytes < shape.regular_slot_bytes:
        wider = plan.window_tokens + shape.unit_tokens
        assert (
            wider > sum(plan.blocks) // 2 * shape.page_tokens
            or wider * shape.window_slot_bytes > local_bytes // 2
            or wider > window_limit_tokens(local_bytes, shape)
        ), "it stays short with memory to spare"


@pytest.mark.parametrize(("gib", "context"), [(3, 40960), (4, 40960), (5, 40960), (8, 131072)])
def test_auto_reaches_the_models_context_where_memory_allows(gib: int, context: int) -> None:
    plan = plan_auto(gib * GIB, [120 * GIB], context, QWEN3_8B)
    assert context <= plan.total_tokens < context + 2 * QWEN3_8B.unit_tokens
    stock = gib * GIB // QWEN3_8B.token_bytes
    assert plan.regular_tokens > stock * 0.85, "a window costs little"


def test_auto_without_donors_makes_no_window() -> None:
    assert plan_auto(8 * GIB, [], 131072, QWEN3_8B).window_tokens == 0
