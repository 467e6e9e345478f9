"""Donor memory to measure on: where it lies, and which blocks of it a batch names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from cuda.bindings import runtime  # type: ignore[import-untyped]

from swiftcache_kernel import BlockLayout, Runs, find_runs

GPU = torch.device("cuda:0")
PEER = torch.device("cuda:1")
# Of the donor GPU's free memory. Untouched memory is as fast as any, so none of it is filled.
SHARE_OF_FREE_MEMORY = 0.8


class Batch(NamedTuple):
    table: torch.Tensor
    pages: torch.Tensor
    runs: Runs


@dataclass(frozen=True)
class DonorRegion:
    memory: torch.Tensor  # uint8 [bytes]
    local: bool
    """On the pool's own GPU, for want of a peer."""

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def __str__(self) -> str:
        where = "the pool's own GPU, as it reaches no other" if self.local else "another GPU"
        return f"{len(self.memory) >> 30} GiB on {where}"

    def batch(self, layout: BlockLayout, blocks: int, *, scattered: bool) -> Batch:
        """Distinct blocks and pages, in order or at random.

        Where the region holds fewer blocks, those that are left over begin one layer later in the
        same blocks, and so on: other bytes, the same strides, and one more run. Layer 0 of all of
        them lies in the region.
        """
        room = len(self.memory) // layout.block_bytes
        numbers = np.arange(blocks, dtype=np.int64)
        pages = numbers
        if scattered:
            numbers, pages = (np.random.default_rng(i).permutation(numbers) for i in range(2))
        if blocks > room * layout.layers:
            raise ValueError(f"{blocks} blocks do not fit into {len(self.memory)} bytes")
        offsets = numbers % room * layout.block_bytes + numbers // room * layout.layer_bytes
        addresses = self.address + offsets
        table, page_numbers = (torch.from_numpy(these).to(GPU) for these in (addresses, pages))
        return Batch(table, page_numbers, find_runs(addresses, pages, layout.block_bytes))


def take_region(bytes_wanted: int) -> DonorRegion:
    """On the peer, where cuda:0 can address one; else on cuda:0."""
    local = not _reach_peer()
    device = GPU if local else PEER
    free_bytes, _ = torch.cuda.mem_get_info(device)
    size = min(bytes_wanted, int(free_bytes * SHARE_OF_FREE_MEMORY))
    return DonorRegion(torch.empty(size, dtype=torch.uint8, device=device), local)


def plain_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """What nothing that copies these bytes can beat: one copy by the copy engine."""
    stream = torch.cuda.current_stream(GPU).cuda_stream
    kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
    [result] = runtime.cudaMemcpyAsync(
        target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream
    )
    if result != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpyAsync failed with {result.name}")


def _reach_peer() -> bool:
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(GPU, PEER):
        return False
    return enable_peer(GPU, PEER)


def enable_peer(device: torch.device, peer: torch.device) -> bool:
    """Let kernels on ``device`` address plain memory of ``peer``."""
    for each in (peer, device):  # a context on each
        torch.zeros(1, device=each)
    with torch.cuda.device(device):
        [result] = runtime.cudaDeviceEnablePeerAccess(peer.index, 0)
    enabled = runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    return result in (runtime.cudaError_t.cudaSuccess, enabled)
