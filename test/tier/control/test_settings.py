"""Settings from the environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings


def test_defaults_and_variables() -> None:
    assert Settings.from_env({}) == Settings()
    settings = Settings.from_env(
        {
            "SWIFTCACHE_HEARTBEAT_S": "0.25",
            "SWIFTCACHE_EXTENT_BYTES": "2MiB",
            "SWIFTCACHE_SESSIONS_MAX": "3",
            "SWIFTCACHE_RUNTIME_DIR": "/not/a/setting",
            "SWIFTCACHE_CACHE": "/nor/this",
            "SWIFTCACHE_ROLE": "nor this",
            "SWIFTCACHE_MASTER_MODEL": "nor this",
            "SWIFTCACHE_WORKER_MODELS": "nor these",
        }
    )
    assert settings == Settings(heartbeat_s=0.25, extent_bytes=2 << 20, sessions_max=3)


def test_a_variable_that_is_misspelt_is_refused() -> None:
    with pytest.raises(SwiftCacheError) as caught:
        Settings.from_env({"SWIFTCACHE_HEARTBEATS": "1", "SWIFT": "2"})
    line = str(caught.value)
    assert "SWIFTCACHE_HEARTBEATS is not known" in line
    assert "SWIFTCACHE_HEARTBEAT_S" in line
    assert "\n" not in line
    with pytest.raises(SwiftCacheError, match="SWIFTCACHE_BOGUS is not known: expected one like"):
        Settings.from_env({"SWIFTCACHE_BOGUS": "10"})


@given(st.floats(0.001, 2.0), st.integers(1, 1 << 40), st.integers(1, 253))
def test_a_child_process_gets_the_same(heartbeat_s: float, extent: int, extents: int) -> None:
    settings = Settings(heartbeat_s=heartbeat_s, extent_bytes=extent, extents_per_message=extents)
    assert Settings.from_env(settings.as_env()) == settings


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SWIFTCACHE_HEARTBEAT_S", "soon"),
        ("SWIFTCACHE_HEARTBEAT_S", "0"),
        ("SWIFTCACHE_HEARTBEAT_S", "-1"),
        ("SWIFTCACHE_HEARTBEAT_S", "nan"),
        ("SWIFTCACHE_HEARTBEAT_S", "inf"),
        ("SWIFTCACHE_LOST_AFTER_S", "1.5"),
        ("SWIFTCACHE_OWNED_RESTART_MAX_S", "0.5"),
        ("SWIFTCACHE_RESIDENT_SHARE", "1"),
        ("SWIFTCACHE_EXTENT_BYTES", "big"),
        ("SWIFTCACHE_SESSIONS_MAX", "1.5"),
        ("SWIFTCACHE_EXTENTS_PER_MESSAGE", "254"),
        ("SWIFTCACHE_MESSAGE_BYTES_MAX", "100"),
        ("SWIFTCACHE_ADDRESS_SPACE_BYTES", "1000000"),
    ],
)
def test_a_value_that_cannot_work_is_named(variable: str, value: str) -> None:
    with pytest.raises(SwiftCacheError) as caught:
        Settings.from_env({variable: value})
    line = str(caught.value)
    assert variable in line
    assert "expected" in line
    assert "\n" not in line
