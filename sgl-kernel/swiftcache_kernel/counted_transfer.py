"""A batch of blocks in fixed device buffers, its length among them: what CUDA graphs can replay.

`LayerTransfer` binds the number of blocks into each launch. Here the kernel reads it on the device,
so that a captured launch moves whatever batch was loaded last.
"""

from __future__ import annotations

import numpy as np
import torch

from swiftcache_kernel.arguments import check_layer
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.triton_kernels import COUNTED_GRID, Grid, bind_counted_layer


class CountedTransfer:
    """Moves one layer of the loaded batch, in one direction, by the programs of `grid`.

    Needs Triton, and "cuda" or its interpreter; alignment and lifetimes as in `triton_kernels`.
    One thread at a time.
    """

    def __init__(
        self, pool: PoolBuffers, capacity: int, *, gather: bool, grid: Grid = COUNTED_GRID
    ) -> None:
        """capacity: the most blocks that are ever loaded. Compiles the kernel."""
        self._pool = pool
        self._table = torch.zeros(capacity, dtype=torch.int64, device=pool.device)
        self._pages = torch.zeros(capacity, dtype=torch.int64, device=pool.device)
        self._count = torch.zeros(1, dtype=torch.int64, device=pool.device)
        self._launches = grid.launches
        self._launch = bind_counted_layer(
            pool.layout, pool.alignment_bytes, capacity, grid, pool.device, gather=gather
        )

    def load(self, table: np.ndarray, pages: np.ndarray) -> None:
        """Take a batch over, int64 [n] on the host: queued on the current stream, never waits.

        Until then `move` moves the batch that was loaded before, or none. ValueError if n is over
        the capacity.
        """
        n = len(table)
        if n > len(self._table) or n != len(pages):
            raise ValueError(
                f"table has {n} blocks, pages has {len(pages)}; expected as many, up to "
                f"{len(self._table)}"
            )
        staged = torch.from_numpy(np.concatenate([[n], table, pages]))
        if self._pool.device.type == "cuda":
            # from pageable memory the copy would wait for the stream, hence for the forward before
            staged = staged.pin_memory()
        self._count.copy_(staged[:1], non_blocking=True)
        self._table[:n].copy_(staged[1 : n + 1], non_blocking=True)
        self._pages[:n].copy_(staged[n + 1 :], non_blocking=True)

    def move(self, layer: int) -> None:
        """Queue the copy of one layer on the current stream. ValueError if there is no such one."""
        check_layer(layer, self._pool.layout)
        k_address, v_address = self._pool.k_addresses[layer], self._pool.v_addresses[layer]
        for launch in range(self._launches):
            self._launch(self._table, self._pages, self._count, k_address, v_address, layer, launch)
