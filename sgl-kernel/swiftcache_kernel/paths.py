"""Which way to move a batch: the kernels with how many programs, or the copy engine.

A `PathTable` holds how long each way took for some sizes and chooses from that alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from swiftcache_kernel.runs import is_scattered

# Of the best grid's rate, what a smaller grid must reach to be taken.
SHARE_WHEN_IDLE = 0.97
SHARE_BESIDE_COMPUTE = 0.4


class Path(NamedTuple):
    """A way to move a batch; `programs` is the size of the kernel's grid at most."""

    name: Literal["kernel", "copy"]
    programs: int = 0

    def __str__(self) -> str:
        return f"kernel with {self.programs} programs" if self.name == "kernel" else "copy engine"


KERNEL = Path("kernel", programs=32)
"""What is taken where nothing chooses."""
COPY_ENGINE = Path("copy")


class Sample(NamedTuple):
    """A layer of so many blocks took so long."""

    blocks: int
    time_us: float


class Samples(tuple[Sample, ...]):
    """Times of one path, by ascending numbers of blocks; at least one, all above 0."""

    __slots__ = ()

    def time_us(self, blocks: float) -> float:
        """Between two samples on the line through them, beyond the ends on the nearest one.

        More blocks never take less time, whatever noise is in the samples, and few blocks never
        less than their share of the first sample.
        """
        share_us = self[0].time_us * blocks / self[0].blocks
        if len(self) == 1:
            return share_us
        latest_us = list(accumulate((sample.time_us for sample in self), max))
        after = next((i for i in range(1, len(self)) if blocks <= self[i].blocks), len(self) - 1)
        first, last = self[after - 1].blocks, self[after].blocks
        slope = (latest_us[after] - latest_us[after - 1]) / (last - first)
        time_us = latest_us[after - 1] + (blocks - first) * slope
        return max(time_us, share_us) if blocks < self[0].blocks else time_us


class KernelTimes(NamedTuple):
    """Times of the kernel with a grid of so many programs."""

    programs: int
    samples: Samples


class CopyTimes(NamedTuple):
    """Times of the copy engine."""

    one_run: Samples
    scattered: Samples
    """No two blocks in one run; the host's time for the call included."""


@dataclass(frozen=True)
class PathTable:
    """How long each path takes on one link, and the choice that follows."""

    source: str
    """Where the times come from, for the log."""
    layer_bytes: int
    """Bytes of one layer of one block, in all samples."""
    kernel: tuple[KernelTimes, ...]
    """By ascending programs; at least one."""
    copies: CopyTimes | None
    """None where there is no copy engine, or it does not take such copies."""

    def choose(
        self, blocks: int, runs: int | None, layer_bytes: int, compute_running: bool
    ) -> Path:
        """The path for a batch.

        blocks:          how many there are; `layer_bytes` is one layer of one of them.
        runs:            in how many runs they lie (`find_runs`); None if the host does not know
                         them, which leaves the kernel.
        compute_running: whether other kernels want the SMs meanwhile.

        The copy engine takes no SM, so it is taken wherever no grid is faster. Else the smallest
        grid is taken that is nearly as fast as the best; beside compute, one that reaches
        `SHARE_BESIDE_COMPUTE` of its rate.
        """
        equal_blocks = blocks * layer_bytes / self.layer_bytes
        times = [(times.programs, times.samples.time_us(equal_blocks)) for times in self.kernel]
        best_us = min(time_us for _, time_us in times)
        if runs and self.copies:
            copy_us = _copy_us(self.copies, blocks, runs, equal_blocks)
            if copy_us < best_us:
                return COPY_ENGINE
        share = SHARE_BESIDE_COMPUTE if compute_running else SHARE_WHEN_IDLE
        programs = next(programs for programs, us in times if us * share <= best_us)
        return Path("kernel", programs)

    def __str__(self) -> str:
        rates = [
            f"kernel with {times.programs} programs {self._rates(times.samples)}"
            for times in self.kernel
        ]
        if self.copies:
            rates.append(f"copy engine {self._rates(self.copies.one_run)} in one run")
            rates.append(f"{self._rates(self.copies.scattered)} scattered")
        return f"{self.source}, {self.layer_bytes >> 10} KiB blocks: " + ", ".join(rates)

    def _rates(self, samples: Samples) -> str:
        rates = (s.blocks * self.layer_bytes / s.time_us / 1e3 for s in samples)
        sizes = "/".join(str(sample.blocks) for sample in samples)
        return f"{'/'.join(f'{rate:.0f}' for rate in rates)} GB/s ({sizes} blocks)"


def _copy_us(copies: CopyTimes, blocks: int, runs: int, equal_blocks: float) -> float:
    if not is_scattered(blocks, runs):
        return runs * copies.one_run.time_us(equal_blocks / runs)
    # By number for what the host does, by bytes for what the link does.
    return max(copies.scattered.time_us(blocks), copies.one_run.time_us(equal_blocks))


def _samples(*times_us: float) -> Samples:
    return Samples(Sample(64 * 4**i, time_us) for i, time_us in enumerate(times_us))


TWO_H200S = PathTable(
    source="not measured here, as between two H200s over NVLink",
    layer_bytes=64 << 10,
    kernel=(
        # Timed up to 1024 blocks; the last is four times that.
        KernelTimes(8, _samples(19.0, 57.3, 268.4, 1073.6)),
        KernelTimes(16, _samples(19.7, 57.4, 229.8, 933.2)),
        KernelTimes(32, _samples(18.4, 54.1, 194.6, 755.2)),
        KernelTimes(64, _samples(18.2, 53.4, 192.3, 749.8)),
    ),
    copies=CopyTimes(
        one_run=_samples(38.4, 75.3, 195.7, 702.7),
        scattered=_samples(246.0, 855.0, 3110.0),
    ),
)
"""What to choose from where nothing was measured."""
