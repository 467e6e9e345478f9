"""Gather bandwidth into one GPU from one, two and more donor GPUs at once.

    python sgl-kernel/benchmark/bench_many_donors.py

The pool is on cuda:0; blocks lie on cuda:1, then on cuda:1 and 2 in turn, and so on. Whether more
donors bring more says whether the receiver's link or a donor's is the limit. Prints Markdown; the
plain copies run at once, one from each donor, each on a stream of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LAYERS, PAGE_TOKENS, KV_HEADS, HEAD_DIM = 8, 16, 8, 128
BLOCKS = (256, 1024, 4096)


def main() -> int:
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        print(f"{seen} CUDA GPUs are seen here: this needs two or more", file=sys.stderr)
        return 2
    # Imported late: they are of no use without GPUs.
    from donor_region import GPU, enable_peer
    from gpu_timing import time_alone

    from swiftcache_kernel import BlockLayout, PoolBuffers, layer_transfer

    donors = [torch.device("cuda", i) for i in range(1, torch.cuda.device_count())]
    for donor in donors:
        enable_peer(GPU, donor)
    token_bytes = KV_HEADS * HEAD_DIM * 2
    layout = BlockLayout(LAYERS, PAGE_TOKENS, token_bytes, token_bytes)
    shape = (max(BLOCKS) * PAGE_TOKENS, KV_HEADS, HEAD_DIM)
    pool = PoolBuffers(
        layout,
        [torch.empty(shape, dtype=torch.bfloat16, device=GPU) for _ in range(LAYERS)],
        [torch.empty(shape, dtype=torch.bfloat16, device=GPU) for _ in range(LAYERS)],
    )
    region_bytes = max(BLOCKS) * layout.block_bytes
    regions = [torch.empty(region_bytes, dtype=torch.uint8, device=donor) for donor in donors]
    targets = [torch.empty(256 << 20, dtype=torch.uint8, device=GPU) for _ in donors]
    streams = [torch.cuda.Stream(GPU) for _ in donors]

    def copy_from(count: int) -> None:
        current = torch.cuda.current_stream(GPU)
        for region, target, stream in zip(regions[:count], targets, streams, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(region[: target.numel()], non_blocking=True)
            current.wait_stream(stream)

    print("| donors | plain copies, GB/s | " + " | ".join(f"{n} blocks" for n in BLOCKS) + " |")
    print("| --- " * (2 + len(BLOCKS)) + "|")
    for count in range(1, len(donors) + 1):
        plain = time_alone(lambda n=count: copy_from(n)).gpu_us
        cells = [f"{count * (256 << 20) / plain / 1e3:.0f}"]
        for blocks in BLOCKS:
            # Scattered blocks, donor after donor in turn.
            numbers = np.random.default_rng(0).permutation(max(BLOCKS))[:blocks]
            bases = np.array([region.data_ptr() for region in regions[:count]], dtype=np.int64)
            addresses = bases[np.arange(blocks) % count] + numbers * layout.block_bytes
            pages = torch.from_numpy(np.random.default_rng(1).permutation(blocks)).to(GPU)
            transfer = layer_transfer(torch.from_numpy(addresses).to(GPU), pages, pool)
            gpu_us = time_alone(lambda t=transfer: t.gather(3)).gpu_us
            cells.append(f"{blocks * layout.layer_bytes / gpu_us / 1e3:.0f}")
        print(f"| {count} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
