"""An engine without a model, for gpu_check_elastic: pool, allocator and donor, as a server has."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from stopwatch import Stopwatch

from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from sglang.srt.swiftcache.forward_fence import ForwardFence
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.donor.elastic import ElasticDonor
from swiftcache_tier.donor.plan import plan_pool_donor
from swiftcache_tier.settings import Settings

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 36, 8, 128, 16  # Qwen3-8B


class Engine:
    """Does what ``Donation`` does, when it is told to. One thread."""

    def __init__(
        self, device: str, pool_bytes: int, times_layers: int, folder: Path, settings: Settings
    ) -> None:
        layers = LAYERS * times_layers
        page_bytes = 2 * layers * HEADS * HEAD_DIM * 2 * PAGE_TOKENS
        size = pool_bytes // page_bytes * PAGE_TOKENS
        self.pool = ElasticKVPool(
            size,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=layers,
            device=device,
            enable_memory_saver=False,
        )
        stock = PagedTokenToKVPoolAllocator(
            size, PAGE_TOKENS, torch.bfloat16, device, self.pool, need_sort=False
        )
        self.allocator = ElasticAllocator(stock, self.pool)
        self.extent_bytes = self.pool.page_map.extent_bytes
        stream = torch.cuda.Stream() if device == "cuda" else None
        self._fence = ForwardFence(stream, device)
        self._lent: set[int] = set()
        self._rehearse()
        self.sharing = Stopwatch(self.pool.memory.share)
        self.pool.memory.share = self.sharing  # type: ignore[method-assign,assignment]
        plan = plan_pool_donor(self.pool.memory, donor_paths(folder, "engine"), settings)
        self.spec = plan.paths.spec
        self.donor = ElasticDonor(plan, self.pool.memory, settings)
        self.donor.start()

    def lend(self, extents: int) -> None:
        """From the decision to the offer: find, hold, zero, hand over."""
        slots = self._wholly_free(extents)
        assert len(slots) == extents, "the pool is too small"
        self.allocator.hold(slots)
        self._lent.update(slots)
        is_done = self._fence.queue(lambda: self.pool.zero_extents(slots))
        while not is_done():
            time.sleep(0)
        self.donor.lend(slots, extents)

    def take_back(self, deadline_s: float) -> None:
        """From asking to usable: every page can be handed out, and reads as zeros."""
        self.donor.aim(0)
        end_s = time.monotonic() + deadline_s
        while self._lent:
            if time.monotonic() > end_s:
                raise RuntimeError(f"{len(self._lent)} extents are missing after {deadline_s:g} s")
            slots = self.donor.take_returned()
            if not slots:
                time.sleep(0)
                continue
            self._lent.difference_update(slots)
            self.allocator.release(slots)
            self.pool.zero_extents(slots)
        if self.pool.raw_pages.is_cuda:
            torch.cuda.synchronize()

    def close(self) -> None:
        self.donor.stop()
        self.pool.memory.close()

    def _rehearse(self) -> None:
        slots = self._wholly_free(1)
        self.allocator.hold(slots)
        self._fence.queue(lambda: self.pool.zero_extents(slots))
        self.allocator.release(slots)
        self.pool.zero_extents(slots)

    def _wholly_free(self, extents: int) -> list[int]:
        free = self.allocator.free_mask()
        found: list[int] = self.pool.page_map.wholly_free(free, self._lent).tolist()
        return found[:extents]
