"""Measuring how fast extents are read."""

from __future__ import annotations

import os

import pytest
from cuda.bindings import driver as cu

from support.fake_cuda import GRANULARITY, FakeDriver
from swiftcache_tier.extents.cuda import CudaArena
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
from swiftcache_tier.topology.bandwidth import measure_bandwidth


def test_bandwidth_is_measured_and_nothing_is_left_behind(driver: FakeDriver) -> None:
    addresses = CudaAddressRange(2 * GRANULARITY, ordinal=0)
    descriptor = CudaArena(1, context_idle_s=None).create(GRANULARITY).share()
    addresses.map(0, descriptor, GRANULARITY)
    os.close(descriptor)
    streams, contexts = driver.streams, list(driver.contexts)
    assert measure_bandwidth(0, addresses.base, GRANULARITY) == pytest.approx(1)
    no_room = cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    for failing in ("cuMemAlloc", "cuMemcpyAsync", "cuEventCreate"):
        with driver.fail(failing, no_room), pytest.raises(OSError, match=failing):
            measure_bandwidth(0, addresses.base, GRANULARITY)
    assert not driver.buffers
    assert not driver.events
    assert driver.streams == streams
    assert driver.contexts == contexts
    addresses.close()
