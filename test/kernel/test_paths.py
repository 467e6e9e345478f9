"""The choice between the kernels and the copy engine follows from the times alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swiftcache_kernel import COPY_ENGINE, TWO_H200S, PathTable
from swiftcache_kernel.paths import (
    SHARE_BESIDE_COMPUTE,
    SHARE_WHEN_IDLE,
    CopyTimes,
    KernelTimes,
    Sample,
    Samples,
)

KIB = 1024
TIMES_US = st.floats(0.5, 1e6)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    blocks = draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=4, unique=True))
    return Samples(Sample(n, draw(TIMES_US)) for n in sorted(blocks))


@st.composite
def tables(draw: st.DrawFn) -> PathTable:
    grids = draw(st.lists(st.integers(1, 128), min_size=1, max_size=4, unique=True))
    return PathTable(
        source="made up",
        layer_bytes=draw(st.sampled_from([16 * KIB, 64 * KIB, 256 * KIB])),
        kernel=tuple(KernelTimes(programs, draw(samples())) for programs in sorted(grids)),
        copies=draw(st.none() | st.builds(CopyTimes, samples(), samples())),
    )


BLOCKS = st.integers(1, 50_000)
LAYER_BYTES = st.sampled_from([16 * KIB, 64 * KIB, 96 * KIB, 1024 * KIB])


def flat(time_us: float) -> Samples:
    """As long for one block as for a hundred thousand."""
    return Samples([Sample(1, time_us), Sample(100_000, time_us)])


def table(kernel_us: dict[int, float], one_run_us: float, scattered_us: float = 1e6) -> PathTable:
    return PathTable(
        source="made up",
        layer_bytes=64 * KIB,
        kernel=tuple(KernelTimes(programs, flat(us)) for programs, us in kernel_us.items()),
        copies=CopyTimes(flat(one_run_us), flat(scattered_us)),
    )


@given(samples(), BLOCKS, BLOCKS)
def test_more_blocks_never_take_less_time(times: Samples, few: int, many: int) -> None:
    assume(few <= many)
    assert 0 < times.time_us(few) <= times.time_us(many) * (1 + 1e-9)


@given(st.lists(TIMES_US, min_size=1, max_size=4))
def test_a_sample_is_what_it_says(times: list[float]) -> None:
    points = [Sample(10**i, time_us) for i, time_us in enumerate(sorted(times))]
    for point in points:
        assert Samples(points).time_us(point.blocks) == pytest.approx(point.time_us)


def test_times_between_and_beyond_samples() -> None:
    times = Samples([Sample(100, 30.0), Sample(200, 50.0), Sample(400, 60.0)])
    assert times.time_us(150) == pytest.approx(40)
    assert times.time_us(300) == pytest.approx(55)
    assert times.time_us(800) == pytest.approx(80)
    assert times.time_us(50) == pytest.approx(20)
    assert Samples([Sample(100, 30.0)]).time_us(50) == pytest.approx(15)
    # No start-up time shows in these: a part of the first sample, not nothing.
    assert Samples([Sample(100, 1.0), Sample(200, 99.0)]).time_us(50) == pytest.approx(0.5)


@given(tables(), BLOCKS, LAYER_BYTES, st.booleans())
def test_without_runs_the_kernel_is_chosen(
    table: PathTable, blocks: int, layer_bytes: int, compute_running: bool
) -> None:
    path = table.choose(blocks, None, layer_bytes, compute_running)
    assert path.name == "kernel"
    assert path.programs in {times.programs for times in table.kernel}


@given(tables(), BLOCKS, LAYER_BYTES, st.booleans(), st.data())
def test_the_kernel_is_never_far_from_the_best_grid(
    table: PathTable, blocks: int, layer_bytes: int, compute_running: bool, data: st.DataObject
) -> None:
    runs = data.draw(st.none() | st.integers(1, blocks))
    path = table.choose(blocks, runs, layer_bytes, compute_running)
    assume(path.name == "kernel")
    equal_blocks = blocks * layer_bytes / table.layer_bytes
    times = {grid.programs: grid.samples.time_us(equal_blocks) for grid in table.kernel}
    share = SHARE_BESIDE_COMPUTE if compute_running else SHARE_WHEN_IDLE
    assert min(times.values()) >= times[path.programs] * share
    smaller = [programs for programs in times if programs < path.programs]
    assert all(min(times.values()) < times[programs] * share for programs in smaller)


@given(tables(), BLOCKS, LAYER_BYTES, st.data())
def test_compute_never_makes_the_grid_larger(
    table: PathTable, blocks: int, layer_bytes: int, data: st.DataObject
) -> None:
    runs = data.draw(st.none() | st.integers(1, blocks))
    idle = table.choose(blocks, runs, layer_bytes, compute_running=False)
    beside = table.choose(blocks, runs, layer_bytes, compute_running=True)
    assert idle.name == beside.name
    assert beside.programs <= idle.programs


@given(BLOCKS, st.booleans(), st.floats(1, 1e5), st.floats(1, 1e5))
def test_one_run_goes_to_the_copy_engine_if_and_only_if_that_is_faster(
    blocks: int, compute_running: bool, kernel_us: float, copy_us: float
) -> None:
    assume(blocks >= 8)  # fewer blocks are no run worth the name
    path = table({32: kernel_us}, copy_us).choose(blocks, 1, 64 * KIB, compute_running)
    assert (path == COPY_ENGINE) == (copy_us < kernel_us)


def test_each_run_costs_the_copy_engine_its_start() -> None:
    made_up = table({32: 100.0}, one_run_us=30.0)
    names = [made_up.choose(1000, runs, 64 * KIB, False).name for runs in (1, 2, 3, 4, 50)]
    assert names == ["copy", "copy", "copy", "kernel", "kernel"]


def test_scattered_blocks_go_to_the_copy_engine_where_a_batch_is_faster() -> None:
    slow, quick = (table({32: 100.0}, 30.0, scattered_us) for scattered_us in (200.0, 50.0))
    assert slow.choose(1000, 1000, 64 * KIB, False).name == "kernel"
    assert quick.choose(1000, 1000, 64 * KIB, False).name == "copy"


@given(tables(), BLOCKS, LAYER_BYTES, st.booleans(), st.data())
def test_without_a_copy_engine_the_kernel_is_chosen(
    table: PathTable, blocks: int, layer_bytes: int, compute_running: bool, data: st.DataObject
) -> None:
    runs = data.draw(st.integers(1, blocks))
    alone = replace(table, copies=None)
    assert alone.choose(blocks, runs, layer_bytes, compute_running).name == "kernel"
    assert "copy engine" not in str(alone)


def test_larger_blocks_count_for_more() -> None:
    kernel = KernelTimes(32, Samples([Sample(100, 50.0), Sample(1000, 500.0)]))
    one_run = Samples([Sample(100, 80.0), Sample(1000, 400.0)])
    made_up = PathTable("made up", 64 * KIB, (kernel,), CopyTimes(one_run, one_run))
    assert made_up.choose(200, 1, 64 * KIB, False).name == "kernel"
    assert made_up.choose(200, 1, 256 * KIB, False).name == "copy"


def test_between_two_h200s() -> None:
    def path(blocks: int, runs: int | None, compute_running: bool = False) -> str:
        return str(TWO_H200S.choose(blocks, runs, 64 * KIB, compute_running))

    assert path(64, 64) == path(64, 1) == path(1024, 1) == "kernel with 32 programs"
    assert path(4096, 1) == "copy engine"
    assert path(4096, 1000) == "kernel with 32 programs"
    assert path(1024, 1024, compute_running=True) == "kernel with 8 programs"


def test_a_table_describes_itself_in_one_line() -> None:
    line = str(TWO_H200S)
    assert "\n" not in line
    assert "two H200s" in line
    assert "kernel with 32 programs 228/310/345/355 GB/s (64/256/1024/4096 blocks)" in line
    assert "copy engine 109/223/343/382 GB/s (64/256/1024/4096 blocks) in one run" in line
