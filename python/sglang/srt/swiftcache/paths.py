"""What moves the blocks of one operation: the kernels or the copy engines."""

from __future__ import annotations

import logging

import numpy as np
import torch

from swiftcache_kernel import (
    COPY_ENGINE,
    KERNEL,
    TWO_H200S,
    LayerTransfer,
    Path,
    PathTable,
    PoolBuffers,
    Runs,
    find_runs,
    layer_transfer,
)
from swiftcache_kernel.copy_engine import CopyRefused
from swiftcache_tier.receiver.tier import DonorTier

logger = logging.getLogger(__name__)

MEASURED_BLOCKS = 1024
# Of a store, on average: each run takes the scheduler two calls a layer, some 3 us each.
STORED_RUN_BLOCKS_MIN = 32
# A forward over fewer is as long as reading the weights takes, and waits for the load of every
# layer: then a load that spares it SMs makes it longer.
FORWARD_TO_SPARE_TOKENS = 512
# Loaded by one launch, which costs the scheduler some 20 us before the forward can start.
LAYERS_PER_LAUNCH = 4


class PathChooser:
    """Chooses by size and by whether compute runs beside the copy. Scheduler thread only."""

    def __init__(self, io_backend: str, buffers: PoolBuffers, tier: DonorTier) -> None:
        """``io_backend``: the flag. On a GPU, ``auto`` measures the paths first (some seconds,
        nearly all of them compiling); it overwrites pages of the pool, which must be unused."""
        self._io_backend = io_backend
        self._buffers = buffers
        self._tier = tier
        self._engines_refuse = False
        self._table = TWO_H200S
        if buffers.device.type == "cuda" and io_backend == "auto":
            self._table = _measure(buffers, tier) or TWO_H200S
            logger.info("SwiftCache paths: %s", self._table)

    def load(
        self, blocks: np.ndarray, pages: torch.Tensor, new_tokens: int
    ) -> tuple[LayerTransfer, LayerTransfer]:
        """What moves blocks to the pool: its first layer, which nothing hides, and the rest.

        blocks:     ids, int64 [blocks] on the host.
        pages:      their pages of the pool, int64 [blocks] on its device.
        new_tokens: what the forward that waits for them computes.
        """
        addresses = self._tier.addresses(blocks)
        if self._buffers.device.type == "cpu":
            only = layer_transfer(torch.from_numpy(addresses), pages, self._buffers)
            return only, only
        table = self._upload(addresses)
        runs = None
        if self._io_backend == "copy":
            # Waits for the forward in flight, behind which SGLang has taken the pages: that is more
            # than the copy engine saves.
            runs = self._runs(blocks, addresses, pages.cpu().numpy())
        if runs is not None:
            only = layer_transfer(table, pages, self._buffers, path=COPY_ENGINE, runs=runs)
            return only, only
        spares_forward = (False, new_tokens >= FORWARD_TO_SPARE_TOKENS)
        paths = [self._kernel(len(blocks), spares) for spares in spares_forward]
        first = layer_transfer(table, pages, self._buffers, path=paths[0])
        if paths[1] == paths[0]:
            return first, first
        return first, layer_transfer(table, pages, self._buffers, path=paths[1])

    def store(
        self, blocks: np.ndarray, pages: torch.Tensor, host_pages: np.ndarray
    ) -> LayerTransfer:
        """What moves pages of the pool to blocks; both as for `load`, ``host_pages`` on the host.

        Nobody waits for a store, so that it is to spare the SMs above all: beside the kernels,
        prefill was seen to lose as much time as they ran, on however few SMs.
        """
        addresses = self._tier.addresses(blocks)
        if self._buffers.device.type == "cpu":
            return layer_transfer(torch.from_numpy(addresses), pages, self._buffers)
        runs = None
        if self._io_backend == "copy" or (
            self._io_backend == "auto" and self._table.copies is not None
        ):
            runs = self._runs(blocks, addresses, host_pages)
        path = self._store_path(len(blocks), runs)
        return layer_transfer(self._upload(addresses), pages, self._buffers, path=path, runs=runs)

    def give_up_copies(self, error: CopyRefused) -> None:
        """Let the kernels do what the engines did not take, from now on.

        They were asked at start of one donor; others may be reached otherwise.
        """
        logger.warning("SwiftCache: %s; from now on the kernels copy", error)
        self._engines_refuse = True

    def _upload(self, addresses: np.ndarray) -> torch.Tensor:
        # From pageable memory the call would wait for the stream, which waits for the forward.
        pinned = torch.from_numpy(addresses).pin_memory()
        return pinned.to(self._buffers.device, non_blocking=True)

    def _runs(
        self, blocks: np.ndarray, addresses: np.ndarray, host_pages: np.ndarray
    ) -> Runs | None:
        """None where the copy engine cannot copy."""
        # One copy cannot span pieces of host memory that were locked one by one.
        if self._engines_refuse or not self._tier.in_gpu_memory(blocks):
            return None
        block_bytes = self._buffers.layout.block_bytes
        return find_runs(addresses, host_pages, block_bytes, self._tier.donor_of(blocks))

    def _store_path(self, blocks: int, runs: Runs | None) -> Path:
        if runs is not None and (
            self._io_backend == "copy" or blocks >= STORED_RUN_BLOCKS_MIN * len(runs)
        ):
            return COPY_ENGINE
        return self._kernel(blocks, True)

    def _kernel(self, blocks: int, compute_running: bool) -> Path:
        """With how many programs."""
        if self._io_backend != "auto":
            return KERNEL
        layer_bytes = self._buffers.layout.layer_bytes
        return self._table.choose(blocks, None, layer_bytes, compute_running)


def load_launches(layers: int) -> dict[int, int]:
    """The layers that each launch of a load moves: how many, by the first of them.

    Few at the start, which the forward wants at once, and at the end, behind which it computes the
    last alone if loading takes longer.
    """
    found: dict[int, int] = {}
    first = 0
    while first < layers:
        count = max(1, min(LAYERS_PER_LAUNCH, first, (layers - first) // 2))
        found[first] = count
        first += count
    return found


def _measure(buffers: PoolBuffers, tier: DonorTier) -> PathTable | None:
    """Time the paths over the longest run of free blocks among the first that are handed out."""
    from swiftcache_kernel.measure import measure_paths

    blocks = tier.alloc(min(tier.free_blocks, 4 * MEASURED_BLOCKS))
    if blocks is None or blocks.size == 0:
        return None
    ordered = np.sort(blocks)
    pieces = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    longest = max(pieces, key=len)[:MEASURED_BLOCKS]
    try:
        return measure_paths(
            int(tier.addresses(longest[:1])[0]),
            len(longest) * buffers.layout.block_bytes,
            buffers,
        )
    finally:
        tier.free(blocks)
