"""The memory of an engine's pool: used as one range, shared extent by extent."""

from __future__ import annotations

import os

import pytest

from support.raw_memory import PAGE, no_descriptor_leaks, peek, poke
from swiftcache_tier.extents import HostAddressRange
from swiftcache_tier.extents.pool_memory import PoolMemory, granularity_bytes


def test_it_reads_as_zeros_and_is_one_range() -> None:
    with no_descriptor_leaks():
        memory = PoolMemory("cpu", 2 * PAGE, 3)
        assert peek(memory.base, memory.size_bytes) == bytes(6 * PAGE)
        poke(memory.base + 2 * PAGE - 2, b"edge")
        assert peek(memory.base + 2 * PAGE - 2, 4) == b"edge"
        memory.close()
        memory.close()


def test_a_receiver_sees_the_extent_that_it_was_handed_and_no_other() -> None:
    memory = PoolMemory("cpu", PAGE, 3)
    poke(memory.base, b"first")
    poke(memory.base + PAGE, b"second")
    window = HostAddressRange(PAGE)
    descriptor = memory.share(1)
    window.map(0, descriptor, PAGE)
    os.close(descriptor)
    assert peek(window.base, 6) == b"second"
    poke(window.base, b"theirs")
    assert peek(memory.base + PAGE, 6) == b"theirs"
    assert peek(memory.base, 5) == b"first"
    memory.close()
    assert peek(window.base, 6) == b"theirs", "it outlives the engine"
    window.close()


def test_sizes_are_multiples_of_the_granularity() -> None:
    assert granularity_bytes("cpu") == PAGE
    with pytest.raises(ValueError, match="multiple"):
        PoolMemory("cpu", PAGE + 1, 2)
