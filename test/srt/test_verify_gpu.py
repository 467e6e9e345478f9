"""Checksums of blocks that a GPU stores: they follow the store, and nobody waits for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.swiftcache.verify import BlockChecksums
from swiftcache_kernel import BlockLayout, PoolBuffers, layer_transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

LAYOUT = BlockLayout(layers=2, page_tokens=16, k_token_bytes=512, v_token_bytes=512)
# A second and more, by the clock of any GPU.
LONG_CYCLES = 3_000_000_000


def test_checksums_follow_the_store_and_find_what_changed() -> None:
    device = torch.device("cuda:0")
    shape, count = (64 * LAYOUT.page_tokens, 2, 128), range(LAYOUT.layers)
    k, v = ([torch.randn(shape, device=device).to(torch.bfloat16) for _ in count] for _ in range(2))
    pool = PoolBuffers(LAYOUT, k, v)
    memory = torch.zeros(8 * LAYOUT.block_bytes, dtype=torch.uint8, device=device)
    blocks = np.array([7, 2, 4])
    addresses = memory.data_ptr() + blocks * LAYOUT.block_bytes
    table = torch.from_numpy(addresses).to(device)
    pages = torch.tensor([5, 0, 63], device=device)
    store = layer_transfer(table, pages, pool)
    checksums = BlockChecksums(pool)

    def queue_store() -> None:
        store.scatter_all()
        checksums.record(blocks, pages)

    queue_store()  # compiles, and takes pinned memory
    torch.cuda.synchronize()
    assert len(checksums) == 3
    checksums.clear()
    memory.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        queue_store()
    assert len(checksums) == 0, "the host waited for the store"
    stream.synchronize()
    assert len(checksums) == 3

    assert not checksums.differ_in_memory(blocks, addresses).any()
    assert not checksums.differ_in_pool(blocks, pages).any()
    memory[2 * LAYOUT.block_bytes + 1000] ^= 4
    k[1][63 * LAYOUT.page_tokens, 1, 7] += 1
    assert checksums.differ_in_memory(blocks, addresses).tolist() == [False, True, False]
    assert checksums.differ_in_pool(blocks, pages).tolist() == [False, False, True]

    checksums.move(np.array([2]), np.array([1]))
    checksums.forget(np.array([7, 1]))
    assert len(checksums) == 1
