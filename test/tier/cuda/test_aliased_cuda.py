"""Buffers on a GPU that share their last part with every other layer."""

from __future__ import annotations

import pytest

from support.fake_cuda import GRANULARITY, FakeDriver
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.aliased import AliasedBuffers, BufferSize, unit_tokens

LAYERS = 3
SIZE = BufferSize(own_bytes=GRANULARITY, window_bytes=GRANULARITY)


def test_the_window_takes_two_sets_and_is_shared_by_parity(driver: FakeDriver) -> None:
    driver.memory_bytes = 64 * GRANULARITY
    buffers = AliasedBuffers("cuda:0", LAYERS, SIZE, SIZE)
    for side in range(2):
        for layer in range(LAYERS):
            address = buffers.address(side, layer)
            for part in (address, address + GRANULARITY):
                assert driver.read(part, GRANULARITY) == bytes(GRANULARITY)
            driver.write(address, bytes([1 + layer]))
        driver.write(buffers.address(side, 0) + GRANULARITY, b"even")
        driver.write(buffers.address(side, 1) + GRANULARITY, b"odd!")
        for layer in range(LAYERS):
            address = buffers.address(side, layer)
            assert driver.read(address, 1) == bytes([1 + layer])
            assert driver.read(address + GRANULARITY, 4) == (b"odd!" if layer % 2 else b"even")
    buffers.close()


def test_too_little_memory_is_told_and_nothing_is_kept(driver: FakeDriver) -> None:
    free = driver.memory_bytes
    with pytest.raises(SwiftCacheError, match="no extent of"):
        AliasedBuffers("cuda:0", 2 * free // GRANULARITY, SIZE, SIZE)
    driver.memory_bytes = 64 * GRANULARITY
    AliasedBuffers("cuda:0", LAYERS, SIZE, SIZE).close()


def test_units_fill_whole_pages_of_gpu_memory(driver: FakeDriver) -> None:
    """Qwen3-8B: 2048 bytes of K a token and layer, so 1024 tokens a page of 2 MiB."""
    assert unit_tokens("cuda:0", 16, (2048, 2048)) == 1024
    assert unit_tokens("cuda:0", 64, (1024, 1024)) == 2048
