"""What moves blocks between donors and a pool that is laid out page by page."""

from __future__ import annotations

import numpy as np
import torch

from sglang.srt.swiftcache.paths import load_launches
from swiftcache_kernel.copy_engine import CopyRefused
from swiftcache_kernel.page_major import PageMajorBuffers, PageMajorTransfer, compile_copies
from swiftcache_tier.receiver.tier import DonorTier


class PageMajorPaths:
    """As ``PathChooser``, with one path: a page is one run of bytes, and a layer a part of it.

    Scheduler thread only.
    """

    def __init__(self, buffers: PageMajorBuffers, tier: DonorTier) -> None:
        """Compiles what loads and stores launch (seconds, the first time on a machine)."""
        self._buffers = buffers
        self._tier = tier
        if buffers.device.type == "cuda":
            layers = buffers.layout.layers
            compile_copies(buffers, [*load_launches(layers).values(), layers])

    def load(
        self, blocks: np.ndarray, pages: torch.Tensor, new_tokens: int
    ) -> tuple[PageMajorTransfer, PageMajorTransfer]:
        """For the first layer and for the rest, see ``PathChooser``."""
        transfer = self._transfer(blocks, pages)
        return transfer, transfer

    def store(
        self, blocks: np.ndarray, pages: torch.Tensor, host_pages: np.ndarray
    ) -> PageMajorTransfer:
        """See ``PathChooser``."""
        return self._transfer(blocks, pages)

    def give_up_copies(self, error: CopyRefused) -> None:
        """There are none: the kernels copy all."""
        raise error

    def _transfer(self, blocks: np.ndarray, pages: torch.Tensor) -> PageMajorTransfer:
        addresses = torch.from_numpy(self._tier.addresses(blocks))
        if self._buffers.device.type == "cuda":
            # From pageable memory the call would wait for the stream.
            addresses = addresses.pin_memory().to(self._buffers.device, non_blocking=True)
        return PageMajorTransfer(addresses, pages.contiguous(), self._buffers)
