"""Move one layer of many KV blocks between donor memory and a device KV pool.

Donor memory is a table of 64-bit virtual addresses; the pool is one K and one V tensor per layer.
See `BlockLayout` for the bytes of a block and `dispatch` for the contract of the two calls.
"""

from __future__ import annotations

from swiftcache_kernel.block_copy import copy_blocks
from swiftcache_kernel.dispatch import gather_layer, scatter_layer
from swiftcache_kernel.layout import BlockLayout

__all__ = ["BlockLayout", "copy_blocks", "gather_layer", "scatter_layer"]
