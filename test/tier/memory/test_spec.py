"""The SPECs of `--swiftcache-donors`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.spec import DonorSpec, parse_specs

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("auto", DonorSpec("auto")),
        ("host=8GiB", DonorSpec("host", device="host", size_bytes=8 * GIB)),
        (" host=512 MiB ", DonorSpec("host", device="host", size_bytes=GIB // 2)),
        ("cuda:1=40GiB", DonorSpec("cuda", device="cuda:1", size_bytes=40 * GIB)),
        ("cuda:0=1024", DonorSpec("cuda", device="cuda:0", size_bytes=1024)),
        ("ipc:///run/sc/gpu1", DonorSpec("ipc", path=Path("/run/sc/gpu1"))),
        ("ipc:////run//sc/../gpu1/", DonorSpec("ipc", path=Path("/run/gpu1"))),
        ("ipc:///run/sc/gpu1.5.fds", DonorSpec("ipc", path=Path("/run/sc/gpu1.5"))),
        ("ipc:///run/sc/gpu1.5.ctl", DonorSpec("ipc", path=Path("/run/sc/gpu1.5"))),
    ],
)
def test_each_form_is_read(text: str, spec: DonorSpec) -> None:
    assert DonorSpec.parse(text) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Auto",
        "auto=1GiB",
        "host",
        "hosts=1GiB",
        "cuda=40GiB",
        "cuda:=40GiB",
        "cuda:-1=40GiB",
        "cuda:01=40GiB",
        "cuda:x=40GiB",
        "tcp://10.0.0.1:5000",
        "/run/sc/gpu1",
        "host=1GiB\ncuda:0=1GiB",
    ],
)
def test_unknown_form_is_refused_with_the_legal_ones(text: str) -> None:
    with pytest.raises(SwiftCacheError) as caught:
        DonorSpec.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "\n" not in message
    for form in ("auto", "host=8GiB", "cuda:1=40GiB", "ipc:///path"):
        assert form in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("host=", "is not a size"),
        ("host=lots", "is not a size"),
        ("cuda:1=-4GiB", "is not a size"),
        ("host=0GiB", "asks for no memory"),
        ("host=0.1B", "asks for no memory"),
        ("cuda:1=9999999TiB", "too large"),
        ("ipc://", "no absolute path"),
        ("ipc:///", "no absolute path"),
        ("ipc://gpu1", "no absolute path"),
        ("ipc://~/gpu1", "no absolute path"),
        ("ipc:///run/\0/gpu1", "no absolute path"),
    ],
)
def test_bad_size_or_path_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(SwiftCacheError, match=reason) as caught:
        DonorSpec.parse(text)
    assert repr(text) in str(caught.value)


@given(
    st.one_of(
        st.builds(lambda n: DonorSpec("host", "host", n), st.integers(1, 2**50)),
        st.builds(
            lambda i, n: DonorSpec("cuda", f"cuda:{i}", n),
            st.integers(0, 15),
            st.integers(1, 2**50),
        ),
        st.builds(
            lambda parts: DonorSpec("ipc", path=Path("/", *parts)),
            st.lists(st.text("abcXYZ019-_ é", min_size=1).map(str.strip).filter(bool), min_size=1),
        ),
        st.just(DonorSpec("auto")),
    )
)
def test_a_spec_prints_as_it_is_written(spec: DonorSpec) -> None:
    assert DonorSpec.parse(str(spec)) == spec


def test_flag_absent_means_no_tier_and_flag_without_value_means_auto() -> None:
    assert parse_specs(None) == []
    assert parse_specs([]) == [DonorSpec("auto")]
    assert parse_specs(["auto"]) == [DonorSpec("auto")]


def test_order_is_kept_and_a_bare_string_is_one_spec() -> None:
    texts = ["cuda:1=40GiB", "host=8GiB", "cuda:0=1GiB", "ipc:///run/a", "ipc:///run/b"]
    assert parse_specs(texts) == [DonorSpec.parse(text) for text in texts]
    assert parse_specs("host=8GiB") == [DonorSpec.parse("host=8GiB")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("auto", "auto"),
        ("host=8GiB", "host=4GiB"),
        ("cuda:1=8GiB", "cuda:1=8GiB"),
        ("ipc:///run/a", "ipc:///run/./a/"),
        ("ipc:///run/a.fds", "ipc:///run/./a"),
        ("ipc:///run/a.ctl", "ipc:///run/a.fds"),
        ("auto", "host=8GiB"),
        ("ipc:///run/a", "auto"),
    ],
)
def test_specs_that_clash_are_refused_by_name(first: str, second: str) -> None:
    with pytest.raises(SwiftCacheError) as caught:
        parse_specs([first, "cuda:7=1GiB", second])
    message = str(caught.value)
    assert "\n" not in message
    assert "cuda:1=40GiB" in message  # the legal forms
    assert repr(first) in message or repr(second) in message


@pytest.mark.parametrize("item", [8, None, {"host": "8GiB"}])
def test_a_config_file_with_other_things_than_strings_is_refused(item: Any) -> None:
    with pytest.raises(SwiftCacheError, match="is not a string"):
        parse_specs([item])
