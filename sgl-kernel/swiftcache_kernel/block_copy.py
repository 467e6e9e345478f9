"""Copy whole blocks from donor memory to donor memory."""

from __future__ import annotations

import ctypes

import torch

from swiftcache_kernel.arguments import check_device_type, check_numbers


def copy_blocks(source: torch.Tensor, target: torch.Tensor, *, block_bytes: int) -> None:
    """Copy block i of `source` to block i of `target`, bit for bit.

    source, target: int64 [n], addresses of first bytes. Targets are distinct and no part of a
    source or of each other; a source may be named twice. n may be 0.

    Both on "cpu": the memory is mapped into this process, addresses may have any alignment, and
    the copy has finished on return. Both on "cuda": the copy is queued on the current stream of
    that device (see `triton_block_copy`), which must reach all addresses; they must be multiples
    of the largest power of two, at most 16, that divides `block_bytes`: nothing checks it.

    ValueError, one line, for arguments that break the contract. Any thread may call.
    """
    for name, numbers in (("source", source), ("target", target)):
        check_numbers(name, numbers)
    check_device_type(source.device)
    if source.device != target.device:
        raise ValueError(
            f"source is on {source.device}, target on {target.device}; expected one device"
        )
    if len(source) != len(target):
        raise ValueError(f"{len(source)} sources, {len(target)} targets; expected as many")
    if block_bytes <= 0:
        raise ValueError(f"block_bytes is {block_bytes}; expected more than 0")
    if not len(source):
        return
    if source.device.type == "cuda":
        # Imported late: a CPU build has no Triton.
        from swiftcache_kernel import triton_block_copy

        triton_block_copy.copy_blocks(source, target, block_bytes=block_bytes)
        return
    # Blocks are hundreds of KiB and more: one call for each is no cost, and an indexed copy of
    # all would hold every byte once more.
    for to_address, from_address in zip(target.tolist(), source.tolist(), strict=True):
        ctypes.memmove(to_address, from_address, block_bytes)
