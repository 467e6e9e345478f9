"""Measure layer gather and scatter: every path, alone, beside a matrix product, on the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from donor_region import GPU, Batch, DonorRegion, plain_copy, take_region
from gpu_timing import host_us, time_alone, time_beside

from swiftcache_kernel import (
    COPY_ENGINE,
    BlockLayout,
    LayerTransfer,
    Path,
    PathTable,
    PoolBuffers,
    gather_layer,
    layer_transfer,
)
from swiftcache_kernel.measure import GRIDS, measure_paths

LAYERS = {"Qwen3-8B": 36, "Qwen3-14B": 40, "Qwen3-32B": 64}
KV_HEADS, HEAD_DIM, DTYPE = 8, 128, torch.bfloat16
PAGES = (16, 64)
BLOCKS = (64, 256, 1024, 4096, 16384)
PATHS = (*(Path("kernel", programs) for programs in GRIDS), COPY_ENGINE)
CEILING_BYTES = 256 << 20
# As much of the largest batches as one GPU may hold; see `DonorRegion.batch` for the rest.
REGION_BYTES = 128 << 30
MEASURED_BLOCKS = 1024
BESIDE_BLOCKS = (256, 1024, 4096)
PRODUCT_SHAPE = (8192, 4096, 12288)
HOST_BLOCKS = 64
# Cases whose turn has not come by then are left out, and said to be.
DEADLINE_S = 75.0


class Case(NamedTuple):
    model: str
    page_tokens: int
    scattered: bool
    gather: bool
    blocks: int

    @property
    def of_all_sizes(self) -> str:
        direction = "gather" if self.gather else "scatter"
        order = "scattered" if self.scattered else "in order"
        return f"{self.model}, pages of {self.page_tokens}, {direction}, blocks {order}"


@dataclass(frozen=True)
class Rates:
    """GB/s (1e9 bytes) of one layer of a case."""

    case: Case
    mib: float
    """Of one layer of all blocks."""
    runs: int
    plain_copy: float
    """Of as many bytes."""
    by_path: dict[str, float]
    auto: str
    """What the measured table chooses while no compute runs."""


@dataclass(frozen=True)
class Slowdown:
    """A gather and a product that start together, in us; blocks of Qwen3-8B, pages of 16.

    The kernels move scattered blocks, the copy engine a run.
    """

    path: str
    blocks: int
    alone: float
    beside: float
    product: float


@dataclass(frozen=True)
class Figures:
    donor: str
    ceilings: dict[str, float]
    """GB/s of a plain copy of 256 MiB, by direction."""
    table: PathTable
    rates: list[Rates]
    left_out: list[Case]
    product_alone_us: float
    slowdowns: list[Slowdown]
    host_us: dict[str, float]
    """What a layer costs the host, by the call that moves it."""
    seconds: float


class Bench:
    """One run. The pool is one layer's buffers, in place of all layers'."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        tokens = max(BLOCKS) * max(PAGES)
        shape = (tokens, KV_HEADS, HEAD_DIM)
        self._k, self._v = (torch.zeros(shape, dtype=DTYPE, device=GPU) for _ in "kv")
        self._scratch = torch.zeros(CEILING_BYTES, dtype=torch.uint8, device=GPU)
        self._product = self._make_product()
        self._region: DonorRegion = take_region(REGION_BYTES)

    def run(self) -> Figures:
        stream = torch.cuda.Stream(GPU)
        with torch.cuda.device(GPU), torch.cuda.stream(stream):
            self._say(f"donor memory: {self._region}")
            ceilings = {"gather": self._plain(CEILING_BYTES, True)}
            ceilings["scatter"] = self._plain(CEILING_BYTES, False)
            pool = self._pool("Qwen3-8B", 16)
            table = measure_paths(
                self._region.address, MEASURED_BLOCKS * pool.layout.block_bytes, pool
            )
            self._say(str(table))
            self._check_paths_agree(pool)
            product_alone, slowdowns = self._slowdowns(pool)
            host = self._host(pool)
            rates, left_out = self._rates(table)
        return Figures(
            donor=str(self._region),
            ceilings=ceilings,
            table=table,
            rates=rates,
            left_out=left_out,
            product_alone_us=product_alone,
            slowdowns=slowdowns,
            host_us=host,
            seconds=time.monotonic() - self._began_s,
        )

    def _rates(self, table: PathTable) -> tuple[list[Rates], list[Case]]:
        rates: list[Rates] = []
        left_out: list[Case] = []
        for case in cases():
            if time.monotonic() - self._began_s > DEADLINE_S:
                left_out.append(case)
                continue
            if case.blocks == BLOCKS[0]:
                self._say(case.of_all_sizes)
            rates.append(self._rate(case, table))
        return rates, left_out

    def _rate(self, case: Case, table: PathTable) -> Rates:
        pool = self._pool(case.model, case.page_tokens)
        batch = self._region.batch(pool.layout, case.blocks, scattered=case.scattered)
        moved_bytes = case.blocks * pool.layout.layer_bytes
        by_path = {}
        for path in PATHS:
            transfer = _transfer(batch, pool, path)
            move = transfer.gather if case.gather else transfer.scatter
            by_path[str(path)] = _rate_of(moved_bytes, time_alone(partial(move, 0)).gpu_us)
        runs = len(batch.runs)
        # A server's loads take the kernels: their pages are not known to the host.
        known = None if case.gather else runs
        auto = table.choose(case.blocks, known, pool.layout.layer_bytes, compute_running=False)
        plain = self._plain(moved_bytes, case.gather)
        return Rates(case, moved_bytes / 2**20, runs, plain, by_path, str(auto))

    def _slowdowns(self, pool: PoolBuffers) -> tuple[float, list[Slowdown]]:
        alone = time_alone(self._product).gpu_us
        slowdowns = []
        for blocks in BESIDE_BLOCKS:
            self._say(f"beside a product of {alone:.0f} us: {blocks} blocks")
            for path in PATHS:
                batch = self._region.batch(pool.layout, blocks, scattered=path != COPY_ENGINE)
                gather = partial(_transfer(batch, pool, path).gather, 0)
                gather_alone = time_alone(gather).gpu_us
                both = time_beside(gather, self._product)
                slowdowns.append(
                    Slowdown(str(path), blocks, gather_alone, both.call_us, both.product_us)
                )
        return alone, slowdowns

    def _host(self, pool: PoolBuffers) -> dict[str, float]:
        """Means over all layers of one operation, making the transfer included."""
        layers = pool.layout.layers
        in_order, scattered = (
            self._region.batch(pool.layout, HOST_BLOCKS, scattered=scattered)
            for scattered in (False, True)
        )

        def by_transfer(batch: Batch, path: Path) -> float:
            def operation() -> None:
                transfer = _transfer(batch, pool, path)
                for layer in range(layers):
                    transfer.gather(layer)

            return host_us(operation) / layers

        def by_call() -> None:
            table, pages, _ = scattered
            for layer in range(layers):
                k, v = pool.k[layer], pool.v[layer]
                gather_layer(table, pages, k, v, layout=pool.layout, layer=layer)

        kernel = PATHS[0]
        return {
            "gather, kernel": by_transfer(scattered, kernel),
            "gather, copy engine, one run": by_transfer(in_order, COPY_ENGINE),
            f"gather, copy engine, {HOST_BLOCKS} scattered blocks": by_transfer(
                scattered, COPY_ENGINE
            ),
            "gather_layer": host_us(by_call) / layers,
            "scatter_all, kernel": host_us(lambda: _transfer(scattered, pool, kernel).scatter_all())
            / layers,
        }

    def _check_paths_agree(self, pool: PoolBuffers) -> None:
        """All paths must gather the same bytes, or the figures are worth nothing."""
        batch = self._region.batch(pool.layout, 64, scattered=True)
        self._region.memory[: 64 * pool.layout.block_bytes].random_(0, 256)
        torch.cuda.synchronize(self._region.memory.device)
        results = []
        for path in PATHS:
            for buffer in (self._k, self._v):
                buffer.zero_()
            _transfer(batch, pool, path).gather(0)
            tokens = 64 * pool.layout.page_tokens
            gathered = torch.stack((self._k[:tokens], self._v[:tokens])).view(torch.int16)
            results.append(gathered)
        if not results[0].any() or not all(torch.equal(results[0], other) for other in results):
            raise RuntimeError("the paths do not gather the same bytes: run test/kernel first")

    def _plain(self, size_bytes: int, gather: bool) -> float:
        """GB/s. More than the buffer holds are as fast as what it holds."""
        size_bytes = min(size_bytes, CEILING_BYTES)
        donor, pool = self._region.memory[:size_bytes], self._scratch[:size_bytes]
        target, source = (pool, donor) if gather else (donor, pool)
        return _rate_of(size_bytes, time_alone(lambda: plain_copy(target, source)).gpu_us)

    def _pool(self, model: str, page_tokens: int) -> PoolBuffers:
        layers = LAYERS[model]
        token_bytes = KV_HEADS * HEAD_DIM * DTYPE.itemsize
        layout = BlockLayout(layers, page_tokens, token_bytes, token_bytes)
        return PoolBuffers(layout, [self._k] * layers, [self._v] * layers)

    def _make_product(self) -> Callable[[], object]:
        rows, inner, columns = PRODUCT_SHAPE
        left = torch.randn(rows, inner, dtype=DTYPE, device=GPU)
        right = torch.randn(inner, columns, dtype=DTYPE, device=GPU)
        out = torch.empty(rows, columns, dtype=DTYPE, device=GPU)
        return lambda: torch.mm(left, right, out=out)

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began_s:5.1f} s] {what}", file=sys.stderr, flush=True)


def cases() -> Iterator[Case]:
    for model in LAYERS:
        for page_tokens in PAGES:
            for gather in (True, False):
                for scattered in (True, False):
                    for blocks in BLOCKS:
                        yield Case(model, page_tokens, scattered, gather, blocks)


def _transfer(batch: Batch, pool: PoolBuffers, path: Path) -> LayerTransfer:
    return layer_transfer(batch.table, batch.pages, pool, path=path, runs=batch.runs)


def _rate_of(size_bytes: int, time_us: float) -> float:
    return size_bytes / time_us / 1e3
