"""Extents for any pair of models, against the definition: what tiles, and what is left over."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftcache_tier.blocks import DonorGeometry, KVFormat
from swiftcache_tier.blocks.meu import (
    donor_extent,
    exact_extent_bytes,
    fit_lease,
    minimum_elastic_unit,
)
from swiftcache_tier.errors import SwiftCacheError

MIB = 1 << 20
GPU_PAGE = 2 * MIB
WANTED = 32 * MIB

QWEN3_8B = KVFormat(layers=36, kv_heads=8, head_dim=128)
QWEN3_32B = KVFormat(layers=64, kv_heads=8, head_dim=128)
QWEN3_0_6B = KVFormat(layers=28, kv_heads=8, head_dim=128)
SMOLLM2_135M = KVFormat(layers=30, kv_heads=3, head_dim=64)

formats = st.builds(
    KVFormat,
    layers=st.integers(1, 128),
    kv_heads=st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 32, 40]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype_bytes=st.sampled_from([1, 2, 4]),
    page_tokens=st.sampled_from([1, 16, 32, 64]),
)
granularities = st.sampled_from([4096, GPU_PAGE])


def test_the_sizes_of_a_page() -> None:
    assert QWEN3_8B.layer_page_bytes == 64 << 10
    assert QWEN3_8B.page_bytes == 2.25 * MIB
    assert QWEN3_8B.token_bytes == 144 << 10
    assert KVFormat(32, 8, 128, dtype_bytes=1, page_tokens=64).page_bytes == 4 * MIB


def test_ranks_divide_the_heads_down_to_one() -> None:
    assert KVFormat(36, 8, 128, tp_size=2).page_bytes == QWEN3_8B.page_bytes // 2
    assert KVFormat(36, 8, 128, tp_size=16).page_bytes == QWEN3_8B.page_bytes // 8


def test_a_format_of_nothing_is_refused_by_name() -> None:
    with pytest.raises(SwiftCacheError, match="kv_heads of a KV format is 0"):
        KVFormat(layers=36, kv_heads=0, head_dim=128)


def test_qwen3_8b_lends_to_qwen3_32b_in_units_of_36_mib() -> None:
    unit = minimum_elastic_unit(QWEN3_32B.page_bytes, QWEN3_8B.page_bytes)
    assert unit == (36 * MIB, 9, 16)


@given(formats, formats)
def test_the_unit_is_the_least_run_that_pages_of_both_sides_tile(
    receiver: KVFormat, donor: KVFormat
) -> None:
    unit = minimum_elastic_unit(receiver.page_bytes, donor.page_bytes)
    assert unit.receiver_pages * receiver.page_bytes == unit.unit_bytes
    assert unit.donor_pages * donor.page_bytes == unit.unit_bytes
    assert math.gcd(unit.receiver_pages, unit.donor_pages) == 1


@given(formats, granularities)
def test_an_extent_can_be_mapped_and_is_not_much_more_than_wanted(
    donor: KVFormat, granularity: int
) -> None:
    extent = donor_extent(donor.page_bytes, granularity_bytes=granularity, wanted_bytes=WANTED)
    assert extent.extent_bytes % granularity == 0
    assert WANTED <= extent.extent_bytes <= 4 * WANTED
    if extent.pages is None:
        assert math.lcm(donor.page_bytes, granularity) > 2 * WANTED
    else:
        assert extent.pages * donor.page_bytes == extent.extent_bytes


@given(formats, st.lists(formats, min_size=1, max_size=3))
def test_a_donor_gets_the_exact_extents_of_partners_named_beforehand(
    donor: KVFormat, partners: list[KVFormat]
) -> None:
    exact = exact_extent_bytes(
        [side.page_bytes for side in (donor, *partners)],
        granularity_bytes=GPU_PAGE,
        wanted_bytes=WANTED,
    )
    assert exact >= WANTED
    extent = donor_extent(donor.page_bytes, granularity_bytes=GPU_PAGE, wanted_bytes=exact)
    assert extent == (exact, exact // donor.page_bytes)
    for partner in partners:
        assert not fit_lease(1, exact, partner.page_bytes).waste_bytes


def test_a_pair_with_a_huge_unit_lends_in_moderate_extents_all_the_same() -> None:
    pages = [QWEN3_0_6B.page_bytes, SMOLLM2_135M.page_bytes]
    exact = exact_extent_bytes(pages, granularity_bytes=GPU_PAGE, wanted_bytes=WANTED)
    assert exact == 630 * MIB
    donor = donor_extent(QWEN3_0_6B.page_bytes, granularity_bytes=GPU_PAGE, wanted_bytes=WANTED)
    assert donor == (42 * MIB, 24)
    fit = fit_lease(25, donor.extent_bytes, SMOLLM2_135M.page_bytes)
    assert fit.waste_bytes < SMOLLM2_135M.page_bytes


def test_pages_that_would_make_extents_too_coarse_straddle_instead() -> None:
    donor = KVFormat(layers=127, kv_heads=3, head_dim=64)
    assert math.lcm(donor.page_bytes, GPU_PAGE) > 4 * WANTED
    extent = donor_extent(donor.page_bytes, granularity_bytes=GPU_PAGE, wanted_bytes=WANTED)
    assert extent == (64 * MIB, None)


@given(formats, formats, granularities, st.integers(1, 100))
def test_a_lease_wastes_less_than_a_block_and_only_a_larger_block_is_refused(
    receiver: KVFormat, donor: KVFormat, granularity: int, extents: int
) -> None:
    extent = donor_extent(donor.page_bytes, granularity_bytes=granularity, wanted_bytes=WANTED)
    if receiver.page_bytes > extents * extent.extent_bytes:
        with pytest.raises(SwiftCacheError, match="--page-size"):
            fit_lease(extents, extent.extent_bytes, receiver.page_bytes)
        return
    fit = fit_lease(extents, extent.extent_bytes, receiver.page_bytes)
    assert fit.lease_bytes == extents * extent.extent_bytes
    assert fit.blocks * receiver.page_bytes + fit.waste_bytes == fit.lease_bytes
    assert 0 <= fit.waste_bytes < receiver.page_bytes
    pool = DonorGeometry(receiver.page_bytes, extent.extent_bytes, extents, 0)
    assert pool.blocks == fit.blocks, "the receiver's pool and the plan disagree"


@settings(deadline=None)
@given(formats, formats, st.integers(1, 8), st.data())
def test_a_run_of_extents_anywhere_wastes_less_than_two_blocks(
    receiver: KVFormat, donor: KVFormat, extents: int, data: st.DataObject
) -> None:
    """What is left when extents around it were given back: the blocks across its two edges go."""
    extent = donor_extent(donor.page_bytes, granularity_bytes=GPU_PAGE, wanted_bytes=WANTED)
    first = data.draw(st.integers(0, extents - 1))
    last = data.draw(st.integers(first, extents - 1))
    start, end = first * extent.extent_bytes, (last + 1) * extent.extent_bytes
    geometry = DonorGeometry(receiver.page_bytes, extent.extent_bytes, extents, 0)
    run = list(range(first, last + 1))
    touched = geometry.blocks_touching(run)
    others = geometry.blocks_touching([slot for slot in range(extents) if slot not in run])
    usable = np.setdiff1d(touched, others).size
    assert end - start - usable * receiver.page_bytes < 2 * receiver.page_bytes
