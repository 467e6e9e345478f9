"""Time every path once, at start, so that `PathTable.choose` knows this machine's links."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.copy_engine import CopyEngine, CopyRefused, CopyTransfer
from swiftcache_kernel.kernel_transfer import KernelTransfer, compile_kernels
from swiftcache_kernel.paths import CopyTimes, KernelTimes, PathTable, Sample, Samples
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.runs import find_runs

GRIDS = (8, 16, 32, 64)
BLOCKS = (64, 256, 1024)
# The call for 1024 scattered blocks takes the host 3 ms.
SCATTERED_BLOCKS = (64, 256)
REPEATS = 3


def measure_paths(address: int, size_bytes: int, pool: PoolBuffers) -> PathTable:
    """Gather from `size_bytes` of donor memory mapped at `address`, by each path.

    Some 10 ms over NVLink and twice that over PCIe for 1024 blocks; where the memory or the pool
    holds fewer, fewer are timed. Compiles the kernels first, which may take seconds. Overwrites
    the first pages of the pool's layer 0; the donor memory is only read, and may hold anything.
    Whatever else uses the link or the GPU meanwhile spoils the times.

    `pool` is on "cuda". Works on a stream of its own, behind what the current one holds, and
    waits for it. Where the copy engine refuses such copies, the table says so and leaves it out.
    ValueError if there is no room for one block.
    """
    began_s = time.monotonic()
    room = min(size_bytes // pool.layout.block_bytes, pool.pages)
    if room < 1:
        raise ValueError(
            f"{size_bytes} bytes and {pool.pages} pages hold no block of "
            f"{pool.layout.block_bytes} bytes; expected room for one"
        )
    compile_kernels(pool)
    compiled_s = time.monotonic()
    addresses = address + np.arange(room, dtype=np.int64) * pool.layout.block_bytes
    engine = CopyEngine(pool.device)

    def by_kernel(programs: int, blocks: int) -> LayerTransfer:
        table = torch.from_numpy(addresses[:blocks]).to(pool.device)
        pages = torch.arange(blocks, device=pool.device)
        return KernelTransfer(table, pages, pool, programs)

    def by_copies(step: int, blocks: int) -> LayerTransfer:
        page_numbers = np.arange(blocks, dtype=np.int64)[::step].copy()
        runs = find_runs(addresses[:blocks], page_numbers, pool.layout.block_bytes)
        table, pages = (
            torch.from_numpy(numbers).to(pool.device) for numbers in (runs.addresses, runs.pages)
        )
        return CopyTransfer(table, pages, pool, runs, engine)

    copies: CopyTimes | None
    refused = ""
    sizes, scattered_sizes = (_that_fit(blocks, room) for blocks in (BLOCKS, SCATTERED_BLOCKS))
    stream = torch.cuda.Stream(pool.device)
    stream.wait_stream(torch.cuda.current_stream(pool.device))
    with torch.cuda.device(pool.device), torch.cuda.stream(stream):
        kernel = tuple(KernelTimes(grid, _time(partial(by_kernel, grid), sizes)) for grid in GRIDS)
        try:
            copies = CopyTimes(
                one_run=_time(partial(by_copies, 1), sizes),
                scattered=_time(partial(by_copies, -1), scattered_sizes),
            )
        except CopyRefused as error:
            copies, refused = None, f" ({error})"
    measured_ms = (time.monotonic() - compiled_s) * 1e3
    compiled_ms = (compiled_s - began_s) * 1e3
    return PathTable(
        source=f"measured on {pool.device} in {measured_ms:.0f} ms after {compiled_ms:.0f} ms of "
        f"compiling{refused}",
        layer_bytes=pool.layout.layer_bytes,
        kernel=kernel,
        copies=copies,
    )


def _that_fit(sizes: Sequence[int], room: int) -> list[int]:
    return [size for size in sizes if size <= room] or [room]


def _time(transfer_of: Callable[[int], LayerTransfer], sizes: Sequence[int]) -> Samples:
    """Mean time of a gather among REPEATS, after one to warm up."""
    samples = []
    for blocks in sizes:
        transfer = transfer_of(blocks)
        transfer.gather(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            transfer.gather(0)
        end.record()
        end.synchronize()
        samples.append(Sample(blocks, start.elapsed_time(end) * 1e3 / REPEATS))
    return Samples(samples)
