"""Time steps that stream: compute alone, copies alone, and both, for each variant and size."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from donor_region import GPU, plain_copy, take_region
from gpu_timing import time_alone
from layer_stream_attention import LIBRARIES
from layer_stream_step import DTYPE, Copies, Model, Sets, Shape, Streams
from layer_stream_variants import Variant

from swiftcache_kernel import BlockLayout, PoolBuffers
from swiftcache_kernel.counted_transfer import CountedTransfer
from swiftcache_kernel.triton_kernels import Grid

PAGE_TOKENS = 16
CEILING_BYTES = 256 << 20


class Plan(NamedTuple):
    """What to measure."""

    variants: Sequence[Variant]
    gigabytes: Sequence[float]
    """Streamed in a step, all layers together."""
    batches: Sequence[int]
    """Requests in a step."""
    local_tokens: int
    """In regular slots: attended with what is streamed, never copied."""
    layers: int
    distinct_layers: int
    attention: str
    deadline_s: float
    kernels: bool
    """Whether to tell how long each kernel takes, for the first size and batch."""


class Case(NamedTuple):
    gigabytes: float
    batch: int


class Timed(NamedTuple):
    """A step of one variant, ms."""

    variant: str
    case: Case
    copies_alone: float
    both: float


@dataclass
class Figures:
    donor: str
    attention: str
    ceiling: float = 0.0
    """GB/s of a plain copy of 256 MiB."""
    streamed_bytes: dict[float, int] = field(default_factory=dict)
    """By the gigabytes that were asked for: whole blocks."""
    compute_alone: dict[Case, float] = field(default_factory=dict)
    """ms of a step."""
    timed: list[Timed] = field(default_factory=list)
    left_out: int = 0
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)
    """ms of a step by kernel, for compute alone and by variant."""
    seconds: float = 0.0

    def floor_ms(self, case: Case) -> float:
        """Nothing that overlaps all it can is faster."""
        link_ms = self.streamed_bytes[case.gigabytes] / self.ceiling / 1e6
        return max(self.compute_alone[case], link_ms)


class Bench:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self._began_s = time.monotonic()
        self._plan = plan
        self._shape = Shape(plan.layers)
        token_bytes = self._shape.kv_width * DTYPE.itemsize
        self._layout = BlockLayout(plan.layers, PAGE_TOKENS, token_bytes, token_bytes)
        self._blocks = {
            size: round(size * 1e9 / self._layout.block_bytes) for size in plan.gigabytes
        }
        self._capacity = max(*self._blocks.values(), *plan.batches)
        self._region = take_region(self._capacity * self._layout.block_bytes)
        self._model = Model(self._shape, plan.distinct_layers, GPU)
        self._local_pages = plan.local_tokens // PAGE_TOKENS
        slots = (self._local_pages + self._capacity) * PAGE_TOKENS
        kv_shape = (slots, self._shape.kv_heads, self._shape.head_dim)
        most_sets = max(variant.sets for variant in plan.variants)
        self._k, self._v = (
            [torch.zeros(kv_shape, dtype=DTYPE, device=GPU) for _ in range(most_sets)] for _ in "kv"
        )
        self._gathers: dict[tuple[Grid, int], CountedTransfer] = {}
        self._scatters: dict[int, CountedTransfer] = {}
        self._streams: dict[tuple[str, int], torch.cuda.Stream] = {}
        self._alone_ms: dict[tuple[Grid, int, float], float] = {}

    def run(self) -> Figures:
        plan = self._plan
        figures = Figures(str(self._region), plan.attention)
        figures.streamed_bytes = {
            size: blocks * self._layout.block_bytes for size, blocks in self._blocks.items()
        }
        with torch.cuda.device(GPU), torch.cuda.stream(self._stream("timing", 0)):
            self._say(f"donor memory: {self._region}")
            figures.ceiling = self._plain_copy_rate()
            for batch in plan.batches:
                for gigabytes in plan.gigabytes:
                    self._measure(Case(gigabytes, batch), figures)
        figures.seconds = time.monotonic() - self._began_s
        return figures

    def _measure(self, case: Case, figures: Figures) -> None:
        plan = self._plan
        if self._late():
            figures.left_out += len(plan.variants)
            return
        step = self._step(case)
        for priority in (0, -1):  # loads kernels and makes workspaces, which no capture allows
            with torch.cuda.stream(self._stream("main", priority)):
                step(None)
        compute = self._capture(lambda: step(None), self._stream("main", 0))
        figures.compute_alone[case] = time_alone(compute.replay).gpu_us / 1e3
        self._say(f"{case.gigabytes:g} GB, batch of {case.batch}")
        kernels = plan.kernels and case == (plan.gigabytes[0], plan.batches[0])
        if kernels:
            figures.kernels["compute alone"] = _kernel_times(compute)
        for variant in plan.variants:
            if self._late():
                figures.left_out += 1
                continue
            self._load(variant, case)
            main = self._stream("main", -1 if variant.first == "compute" else 0)
            both = self._capture(lambda v=variant: step(v), main)
            both_ms = time_alone(both.replay).gpu_us / 1e3
            figures.timed.append(Timed(str(variant), case, self._copies_ms(variant, case), both_ms))
            if kernels:
                figures.kernels[str(variant)] = _kernel_times(both)

    def _step(self, case: Case) -> Callable[[Variant | None], object]:
        """Queues a step, with the copies of a variant or without any."""
        pages = self._local_pages + self._blocks[case.gigabytes]
        of_request = pages // case.batch
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        order = order[: of_request * case.batch].view(case.batch, of_request, 1)
        slots = (order * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1).to(GPU)
        attention = LIBRARIES[self._plan.attention](self._shape, slots, PAGE_TOKENS)
        x = torch.randn(case.batch, self._shape.hidden, dtype=DTYPE, device=GPU)
        new_slots = slots[:, -1].contiguous()

        def step(variant: Variant | None) -> object:
            sets = variant.sets if variant else 2
            kv = Sets(self._k[:sets], self._v[:sets])
            copies = self._copies(variant) if variant else None
            return self._model.step(x, new_slots, kv, attention, copies)

        return step

    def _copies_ms(self, variant: Variant, case: Case) -> float:
        """What else a variant changes does not matter while nothing computes."""
        key = variant.grid, variant.sets, case.gigabytes
        if key not in self._alone_ms:

            def queue() -> None:
                copies = self._copies(variant)
                copies.begin()
                for layer in range(self._plan.layers):
                    copies.enter(layer)
                    copies.leave(layer)
                copies.end()

            graph = self._capture(queue, self._stream("main", 0))
            self._alone_ms[key] = time_alone(graph.replay).gpu_us / 1e3
        return self._alone_ms[key]

    def _copies(self, variant: Variant) -> Copies:
        priority = -1 if variant.first == "copies" else 0
        gathers = self._stream("gathers", priority)
        at_entry = variant.order == "at-entry"
        streams = Streams(gathers, gathers if at_entry else self._stream("scatters", priority))
        gather, scatter = self._transfers(variant)
        return Copies(gather, scatter, self._plan.layers, variant, streams)

    def _load(self, variant: Variant, case: Case) -> None:
        gather, scatter = self._transfers(variant)
        for transfer, blocks in (
            (gather, self._blocks[case.gigabytes]),
            (scatter, case.batch),
        ):
            batch = self._region.batch(self._layout, blocks, scattered=True)
            transfer.load(batch.table.cpu().numpy(), batch.pages.cpu().numpy() + self._local_pages)

    def _transfers(self, variant: Variant) -> tuple[CountedTransfer, CountedTransfer]:
        """All variants scatter alike: it is a page for each request."""
        sets, layers = variant.sets, range(self._plan.layers)
        key = variant.grid, sets
        if key not in self._gathers:
            buffers = [[kv[layer % sets] for layer in layers] for kv in (self._k, self._v)]
            pool = PoolBuffers(self._layout, *buffers)
            self._gathers[key] = CountedTransfer(
                pool, self._capacity, gather=True, grid=variant.grid
            )
            if sets not in self._scatters:
                self._scatters[sets] = CountedTransfer(pool, self._capacity, gather=False)
            for transfer in (self._gathers[key], self._scatters[sets]):
                transfer.move(0)
        return self._gathers[key], self._scatters[sets]

    def _capture(
        self, queue: Callable[[], object], stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        """By hand: `torch.cuda.graph` collects garbage first, which takes longer than all else."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            queue()
            graph.capture_end()
        return graph

    def _stream(self, name: str, priority: int) -> torch.cuda.Stream:
        """The same one each time: a graph keeps the priority of the stream that captured."""
        key = name, priority
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(GPU, priority=priority)
        return self._streams[key]

    def _plain_copy_rate(self) -> float:
        size = min(CEILING_BYTES, len(self._region.memory))
        target = torch.empty(size, dtype=torch.uint8, device=GPU)
        source = self._region.memory[:size]
        return size / time_alone(lambda: plain_copy(target, source)).gpu_us / 1e3

    def _late(self) -> bool:
        return time.monotonic() - self._began_s > self._plan.deadline_s

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began_s:5.1f} s] {what}", file=sys.stderr, flush=True)


def _kernel_times(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """ms in one replay, by the kernel's name. Times of kernels that ran at once overlap."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / 1e3 for event in profile.key_averages()}
    return {name: ms for name, ms in times.items() if ms > 0}
