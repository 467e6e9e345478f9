"""``ElasticAllocator``: SGLang's page allocator, some of whose pages are lent away."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang.srt.swiftcache.elastic_pool import ElasticKVPool


class ElasticAllocator(PagedTokenToKVPoolAllocator):
    """Lent pages are held: neither free nor in use, and not handed out by a flush either.

    Low pages are handed out first, so that high extents empty by themselves. Scheduler thread
    only, and outside of SGLang's free groups.
    """

    free_pages: torch.Tensor
    release_pages: torch.Tensor

    def __init__(self, stock: PagedTokenToKVPoolAllocator, pool: ElasticKVPool) -> None:
        """Takes the place of ``stock``, from which nothing has been allocated."""
        self.page_map = pool.page_map
        self.donation: Any = None  # the ``Donation`` that decides what is lent
        super().__init__(
            stock.size, stock.page_size, stock.dtype, stock.device, pool, need_sort=True
        )

    @property
    def held_tokens(self) -> int:
        return self.page_map.held_count * self.page_size

    def clear(self) -> None:
        """Everything is free but what is lent: else a flush would give it two owners."""
        super().clear()
        held = self.page_map.held
        self._remove(held[held <= self.num_pages])  # a resize may have put some out of range

    def free_mask(self) -> np.ndarray:
        """Which pages could be handed out now, bool [pages]. On a GPU, waits for the free list."""
        mask = np.zeros(self.page_map.pages, dtype=bool)
        mask[torch.cat((self.free_pages, self.release_pages)).cpu().numpy()] = True
        return mask

    def hold(self, slots: list[int]) -> None:
        """Take the pages of wholly free extents out. ValueError if one is in use."""
        pages = self.page_map.hold(slots)
        try:
            self._remove(pages)
        except ValueError:
            self.page_map.release(slots)
            raise

    def release(self, slots: list[int]) -> None:
        """The extents are back: their pages can be handed out."""
        self.give(self.page_map.release(slots))

    def take(self, pages: np.ndarray) -> None:
        """Take free pages, int64, for a use of one's own. ValueError if one is not free."""
        self._remove(pages)

    def give(self, pages: np.ndarray) -> None:
        """Pages, int64, are free again."""
        fresh = torch.from_numpy(pages).to(self.device, non_blocking=True)
        self.release_pages = torch.cat((fresh, self.release_pages))

    def _remove(self, pages: np.ndarray) -> None:
        free = torch.cat((self.free_pages, self.release_pages))
        # By a mask, which neither sorts nor searches: the cost hardly grows with the pool.
        left = torch.zeros(self.page_map.pages, dtype=torch.bool, device=self.device)
        left[free] = True
        left[torch.from_numpy(pages).to(self.device)] = False
        rest = torch.nonzero(left).flatten()
        if len(rest) != len(free) - len(pages):
            raise ValueError(f"{len(rest) + len(pages) - len(free)} of {len(pages)} are not free")
        self.free_pages = rest
        self.release_pages = rest[:0]
