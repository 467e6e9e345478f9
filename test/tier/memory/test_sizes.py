"""Sizes as users write them and as the programs print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import count_extents, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("17B", 17),
        ("1KiB", 2**10),
        ("512MiB", 512 * 2**20),
        ("40GiB", 40 * 2**30),
        ("2TiB", 2 * 2**40),
        ("1.5 GiB", 3 * 2**29),
        (" 8gib ", 8 * 2**30),
        ("40GB", 40 * 10**9),
        ("1.0000000001KiB", 1024),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_size_is_read(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "40 G iB", "40G", "1e9", "0x10", "1,5GiB", "nan", "inf", "٣GiB", "1\n2"],
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SwiftCacheError, match="40GiB") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["9223372036854775808", "8388608TiB", "9" * 400 + "TiB"])
def test_size_that_no_system_call_takes_is_refused(text: str) -> None:
    with pytest.raises(SwiftCacheError, match="too large"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**30 - 1, "1 GiB"),
        (32 * 2**20, "32 MiB"),
        (2**40, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_size_is_written(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(("extents", "text"), [(0, "0 extents"), (1, "1 extent"), (2, "2 extents")])
def test_extents_are_counted_as_people_do(extents: int, text: str) -> None:
    assert count_extents(extents) == text


@given(st.integers(0, 2**62))
def test_written_size_reads_back_to_within_a_rounding(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes))
    assert abs(again - size_bytes) <= size_bytes * 0.05


@given(st.integers(0, 4096), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_units_read_exactly(number: int, unit: str) -> None:
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert parse_size(f"{number}{unit}") == number * 1024**power


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    assert str(SwiftCacheError("name 'a\nb\r\nc' is taken")) == "name 'a b c' is taken"
