"""Move one layer of many KV blocks between donor memory and a device KV pool.

Donor memory is a table of 64-bit virtual addresses; the pool is one K and one V tensor per layer.
See `BlockLayout` for the bytes of a block and `dispatch` for the contract of the calls.
`measure.measure_paths`, which needs a GPU, is imported by itself.
"""

from __future__ import annotations

from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.block_copy import copy_blocks
from swiftcache_kernel.checksum import block_checksums, page_checksums
from swiftcache_kernel.dispatch import gather_layer, layer_transfer, scatter_layer
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.paths import COPY_ENGINE, KERNEL, TWO_H200S, Path, PathTable
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.runs import Runs, find_runs

__all__ = [
    "COPY_ENGINE",
    "KERNEL",
    "TWO_H200S",
    "BlockLayout",
    "LayerTransfer",
    "Path",
    "PathTable",
    "PoolBuffers",
    "Runs",
    "block_checksums",
    "copy_blocks",
    "find_runs",
    "gather_layer",
    "layer_transfer",
    "page_checksums",
    "scatter_layer",
]
