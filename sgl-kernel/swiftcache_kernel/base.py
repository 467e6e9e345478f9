"""The contract of moving a batch of blocks, one layer after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from swiftcache_kernel.arguments import check_batch, check_layer
from swiftcache_kernel.pool_buffers import PoolBuffers


class LayerTransfer(ABC):
    """Blocks of donor memory and the pool pages they pair with, to be moved layer by layer.

    Made by `dispatch.layer_transfer`, which states what the arguments mean. Whatever is the same
    for all layers is resolved once, so that each layer costs the host little.

    On "cuda" each call queues its copy on the current stream of the pool's device and returns;
    keep this object until the streams have passed its last call, and the memory with it. On "cpu"
    the copy has finished on return. One thread at a time.
    """

    def __init__(self, table: torch.Tensor, pages: torch.Tensor, pool: PoolBuffers) -> None:
        check_batch(table, pages, pool.device)
        self.table = table
        self.pages = pages
        self.pool = pool
        self.blocks = len(table)

    def gather(self, layer: int) -> None:
        """Donor memory -> the pool's buffers of `layer`. ValueError if there is no such layer."""
        check_layer(layer, self.pool.layout)
        if self.blocks:
            self._move(layer, gather=True)

    def gather_layers(self, first: int, layers: int) -> None:
        """As `gather` of `layers` layers in order, from `first` on, in one launch where that is
        possible: it costs the host less, and none of them has arrived before all have."""
        check_layer(first, self.pool.layout)
        check_layer(first + layers - 1, self.pool.layout)
        if self.blocks:
            self._move_layers(first, layers, gather=True)

    def scatter(self, layer: int) -> None:
        """The pool's buffers of `layer` -> donor memory. ValueError if there is no such layer."""
        check_layer(layer, self.pool.layout)
        if self.blocks:
            self._move(layer, gather=False)

    def scatter_all(self) -> None:
        """Every layer of the pool -> donor memory, in one launch where that is possible."""
        if self.blocks:
            self._move_layers(0, self.pool.layout.layers, gather=False)

    @abstractmethod
    def _move(self, layer: int, *, gather: bool) -> None:
        """Move one layer of at least one block."""

    def _move_layers(self, first: int, layers: int, *, gather: bool) -> None:
        for layer in range(first, first + layers):
            self._move(layer, gather=gather)
