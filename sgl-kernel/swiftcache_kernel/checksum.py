"""Checksums of whole blocks: as they lie in donor memory, and as pages of a pool would make them.

A page and the block that it was stored to have the same checksum, on every device. It is the sum,
modulo 2**64, of a mixed value for each word of the block, which depends on the word and on its
place in the block (see `checksum_reference`). A change to one word always changes it; words that
changed places, or any other damage, pass unseen once in 2**64.
"""

from __future__ import annotations

import torch

from swiftcache_kernel import checksum_reference
from swiftcache_kernel.arguments import check_device_type, check_numbers
from swiftcache_kernel.layout import BlockLayout
from swiftcache_kernel.pool_buffers import PoolBuffers


def block_checksums(table: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """The checksum of each block of donor memory: int64 [n], on the device of `table`.

    table: int64 [n], the address of the first byte of each block, in any order. n may be 0.

    On "cpu" the memory is mapped into this process and addresses may have any alignment. On "cuda"
    the work is queued on the current stream of that device (see `triton_checksum`), which must
    reach all addresses; they must be multiples of `layout.alignment_bytes`: nothing checks it.

    ValueError, one line, for arguments that break the contract. Any thread may call.
    """
    check_numbers("table", table)
    check_device_type(table.device)
    if table.device.type == "cpu":
        return checksum_reference.block_checksums(table, layout)
    # Imported late, here and below: a CPU build has no Triton.
    from swiftcache_kernel import triton_checksum

    return triton_checksum.block_checksums(table, layout)


def page_checksums(pages: torch.Tensor, pool: PoolBuffers) -> torch.Tensor:
    """The checksum that the block of each page must have: int64 [n], on the pool's device.

    pages: int64 [n], pages of the pool, in any order. n may be 0.

    On "cpu" pages outside the pool raise ValueError. On "cuda" the work is queued on the current
    stream of the pool's device; pages are not read back: nothing checks them.

    ValueError, one line, for arguments that break the contract. Any thread may call.
    """
    check_numbers("pages", pages)
    if pages.device != pool.device:
        raise ValueError(
            f"pages is on {pages.device}, the pool on {pool.device}; expected one device"
        )
    if pool.device.type == "cpu":
        return checksum_reference.page_checksums(pages, pool)
    from swiftcache_kernel import triton_checksum

    return triton_checksum.page_checksums(pages, pool)
