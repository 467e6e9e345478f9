"""A batch of blocks moved by the Triton kernels; streams, graphs and alignment as they say."""

from __future__ import annotations

import torch

from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.launch import Launch
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.triton_kernels import (
    FEW_PROGRAMS,
    PROGRAMS,
    bind_layer,
    bind_layers,
)


class KernelTransfer(LayerTransfer):
    """One launch of at most `programs` programs for a layer, or for several in a row."""

    def __init__(
        self,
        table: torch.Tensor,
        pages: torch.Tensor,
        pool: PoolBuffers,
        programs: int = PROGRAMS,
    ) -> None:
        super().__init__(table, pages, pool)
        self._programs = programs
        # By direction and number of layers, made at first use: most transfers need few of them.
        self._launches: dict[tuple[bool, int], Launch] = {}

    def _move(self, layer: int, *, gather: bool) -> None:
        launch = self._launches.get((gather, 1))
        if launch is None:
            pool = self.pool
            launch = self._launches[gather, 1] = bind_layer(
                pool.layout,
                pool.alignment_bytes,
                self.blocks,
                self._programs,
                pool.device,
                gather=gather,
            )
        k_address, v_address = self.pool.k_addresses[layer], self.pool.v_addresses[layer]
        launch(self.table, self.pages, self.blocks, k_address, v_address, layer)

    def _move_layers(self, first: int, layers: int, *, gather: bool) -> None:
        if layers == 1:
            self._move(first, gather=gather)
            return
        pool = self.pool
        launch = self._launches.get((gather, layers))
        if launch is None:
            launch = self._launches[gather, layers] = bind_layers(
                pool.layout,
                pool.alignment_bytes,
                self.blocks,
                layers,
                self._programs,
                pool.device,
                gather=gather,
            )
        launch(self.table, self.pages, self.blocks, pool.addresses, first, layers)


def compile_kernels(pool: PoolBuffers) -> None:
    """Compile what transfers of this pool may launch, so that none of them waits for it.

    Some seconds the first time on a machine, then the time to read Triton's cache.
    """
    of_pool = pool.layout, pool.alignment_bytes
    for programs in (FEW_PROGRAMS, FEW_PROGRAMS + 1):
        for gather in (True, False):
            bind_layer(*of_pool, 1, programs, pool.device, gather=gather)
            bind_layers(*of_pool, 1, 1, programs, pool.device, gather=gather)
