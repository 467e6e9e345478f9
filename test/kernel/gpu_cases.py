"""Donor memory that the first GPU can address, shared by the tests on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from kernel.cases import Shape

from swiftcache_kernel import PoolBuffers

GPU = torch.device("cuda:0")
PLACES = ["cuda:0", "cuda:1", "host"]

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def donor_memory(size: int, place: str, seed: int = 0) -> torch.Tensor:
    """Random bytes in GPU memory or pinned in host memory."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    if place == "host":
        return data.pin_memory()
    if place == "cuda:1":
        reach_peer()
    return data.to(place)


@cache
def _peer_is_reached() -> bool:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        return False
    from cuda.bindings import runtime

    for ordinal in (1, 0):  # a context on each, the first GPU's last
        torch.zeros(1, device=f"cuda:{ordinal}")
    with torch.cuda.device(GPU):
        [result] = runtime.cudaDeviceEnablePeerAccess(1, 0)
        runtime.cudaGetLastError()
    return result.name in ("cudaSuccess", "cudaErrorPeerAccessAlreadyEnabled")


def reach_peer() -> None:
    """Let the first GPU address the second's ordinary memory; skips where it cannot."""
    if not _peer_is_reached():
        pytest.skip("needs two GPUs that can address each other")


def on_gpu(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=GPU)


def gpu_pool(shape: Shape, pages: int, seed: int) -> PoolBuffers:
    """A pool of random bits in every layer."""
    buffers = [shape.pool(pages, seed=100 * seed + layer) for layer in range(shape.layers)]
    k, v = ([buffer.to(GPU) for buffer in layers] for layers in zip(*buffers, strict=True))
    return PoolBuffers(shape.layout, k, v)
