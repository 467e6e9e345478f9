"""Where GPU extents of the tests lie, and the receiver's GPU that sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.gpu_memory import GpuView
from swiftcache_tier.cuda_driver import can_access_peer, device_count


@pytest.fixture(params=[0, 1], ids=["own", "peer"])
def donor_ordinal(request: pytest.FixtureRequest) -> int:
    """The GPU that lends to cuda:0: itself, or a peer that it can address."""
    ordinal: int = request.param
    if ordinal >= device_count() or not can_access_peer(0, ordinal):
        pytest.skip("needs two GPUs that can address each other")
    return ordinal


@pytest.fixture
def view() -> Iterator[GpuView]:
    view = GpuView(0)
    yield view
    view.close()
