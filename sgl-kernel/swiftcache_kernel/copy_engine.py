"""Layer gather and scatter by the GPU's copy engines, which leave its SMs to compute.

One strided copy (`cudaMemcpy2DAsync`) moves a whole run of blocks' K or V. Where runs are short it
is one `cudaMemcpyBatchAsync` for the layer instead: between two H200s, for scattered blocks of
64 KiB, it reached 144, 273 and 301 GB/s for 64, 256 and 1024 blocks (the kernels: 230, 314, 349)
and its call took 0.25, 0.86 and 3.1 ms of the host, so it is here for those who must spare the SMs.
Strided copies reached 109, 223, 343 and 382 GB/s for one run of 64, 256, 1024 and 4096 blocks.

Stream rule: as for the kernels; copies are queued on the caller's current stream of the pool's
device and nothing waits. Addresses and pages are read on the host when a call is made, so there is
no use in CUDA graphs, whose replay would copy the blocks of the capture: a call during a capture
raises RuntimeError. A copy that the runtime refuses raises CopyRefused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from swiftcache_kernel.arguments import check_pages
from swiftcache_kernel.base import LayerTransfer
from swiftcache_kernel.pool_buffers import PoolBuffers
from swiftcache_kernel.runs import Runs, is_scattered


class CopyRefused(RuntimeError):
    """The CUDA runtime did not take a copy; it names the call and the runtime's error."""


class Rows(NamedTuple):
    """A strided copy: `rows` rows of `width` bytes each; addresses and pitches in bytes."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


class Engine(Protocol):
    """What can copy. Both calls queue and return."""

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        """One strided copy after the other."""

    def copy_all(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        """Copies from address to address, in any order; sizes in bytes."""


class CopyEngine:
    """The copy engines of one GPU, by the CUDA runtime; on its current stream."""

    def __init__(self, device: torch.device) -> None:
        # Imported late: a fifth of a second, and nothing for a CPU build.
        from cuda.bindings import runtime  # type: ignore[import-untyped]

        self._device = device
        self._runtime = runtime
        self._kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._in_stream_order = runtime.cudaMemcpyAttributes()
        self._in_stream_order.srcAccessOrder = (
            runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        )

    def copy_rows(self, copies: Iterable[Rows]) -> None:
        with torch.cuda.device(self._device):
            stream = self._stream()
            for copy in copies:
                self._call(self._runtime.cudaMemcpy2DAsync, *copy, self._kind, stream)

    def copy_all(self, targets: list[int], sources: list[int], sizes: list[int]) -> None:
        """RuntimeError on the default stream: the runtime does not take a batch there."""
        with torch.cuda.device(self._device):
            stream = self._stream()
            if stream == 0:
                raise RuntimeError(
                    "the current stream is the default stream, which takes no batch of copies; "
                    "make another one current"
                )
            attributes = [self._in_stream_order], [0], 1
            self._call(
                self._runtime.cudaMemcpyBatchAsync,
                targets,
                sources,
                sizes,
                len(sizes),
                *attributes,
                stream,
            )

    def _stream(self) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the copy engine is no use in a CUDA graph, which would replay these very blocks; "
                "capture the kernels instead"
            )
        return torch.cuda.current_stream().cuda_stream

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        result, *_ = function(*arguments)
        if result != self._runtime.cudaError_t.cudaSuccess:
            raise CopyRefused(
                f"{function.__name__} failed with {result.name}; expected addresses that "
                f"{self._device} can reach"
            )


class CopyTransfer(LayerTransfer):
    """One strided copy for each run's K and V, or one batch of copies where runs are short."""

    def __init__(
        self,
        table: torch.Tensor,
        pages: torch.Tensor,
        pool: PoolBuffers,
        runs: Runs,
        engine: Engine,
    ) -> None:
        """`runs` holds what `table` and `pages` do.

        ValueError if it has another number of blocks, or pages outside the pool.
        """
        super().__init__(table, pages, pool)
        if runs.blocks != self.blocks:
            raise ValueError(
                f"table has {self.blocks} blocks, runs have {runs.blocks}; expected the same"
            )
        check_pages(runs.pages, pool.pages)
        self._runs = runs
        self._engine = engine
        layout = pool.layout
        self._scattered = is_scattered(runs.blocks, len(runs))
        if self._scattered:
            self._sizes = [layout.k_bytes] * self.blocks + [layout.v_bytes] * self.blocks
        else:
            first = runs.addresses[runs.starts], runs.pages[runs.starts], runs.lengths
            self._first = list(zip(*(numbers.tolist() for numbers in first), strict=True))

    def _move(self, layer: int, *, gather: bool) -> None:
        if self._scattered:
            self._move_blocks(layer, gather)
        else:
            self._move_runs(layer, gather)

    def _move_runs(self, layer: int, gather: bool) -> None:
        layout = self.pool.layout
        pitch = layout.block_bytes
        parts = (
            (layout.k_offset(layer), self.pool.k_addresses[layer], layout.k_bytes),
            (layout.v_offset(layer), self.pool.v_addresses[layer], layout.v_bytes),
        )
        copies = []
        for address, page, blocks in self._first:
            for offset, buffer, width in parts:
                donor, pool = address + offset, buffer + page * width
                copies.append(
                    Rows(pool, width, donor, pitch, width, blocks)
                    if gather
                    else Rows(donor, pitch, pool, width, width, blocks)
                )
        self._engine.copy_rows(copies)

    def _move_blocks(self, layer: int, gather: bool) -> None:
        layout, runs = self.pool.layout, self._runs
        donor = np.concatenate(
            (
                runs.addresses + layout.k_offset(layer),
                runs.addresses + layout.v_offset(layer),
            )
        ).tolist()
        pool = np.concatenate(
            (
                runs.pages * layout.k_bytes + self.pool.k_addresses[layer],
                runs.pages * layout.v_bytes + self.pool.v_addresses[layer],
            )
        ).tolist()
        targets, sources = (pool, donor) if gather else (donor, pool)
        self._engine.copy_all(targets, sources, self._sizes)
