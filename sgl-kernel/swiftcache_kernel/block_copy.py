"""Copy whole blocks from donor memory to donor memory."""

from __future__ import annotations

import ctypes

import torch


def copy_blocks(source: torch.Tensor, target: torch.Tensor, *, block_bytes: int) -> None:
    """Copy block i of `source` to block i of `target`.

    source, target: int64 [n], addresses of first bytes; targets distinct, none of them a source.
    Both on the CPU, the memory mapped into this process. Has finished on return.
    Raises ValueError if the two differ in length.
    """
    if source.shape != target.shape:
        raise ValueError(f"{len(source)} sources, {len(target)} targets; expected as many")
    for from_address, to_address in zip(source.tolist(), target.tolist(), strict=True):
        ctypes.memmove(to_address, from_address, block_bytes)
