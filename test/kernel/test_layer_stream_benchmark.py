"""What of the benchmark of streamed steps runs without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from support.simulated_gpu import Gpu, Stream

FOLDER = Path(__file__).resolve().parents[2] / "sgl-kernel/benchmark"
LAYERS = 7


class Modules(NamedTuple):
    region: ModuleType
    variants: ModuleType
    step: ModuleType
    attention: ModuleType
    figures: ModuleType
    report: ModuleType


@pytest.fixture(scope="module")
def benchmark() -> Modules:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import donor_region
        import layer_stream_attention
        import layer_stream_figures
        import layer_stream_report
        import layer_stream_step
        import layer_stream_variants
    return Modules(
        donor_region,
        layer_stream_variants,
        layer_stream_step,
        layer_stream_attention,
        layer_stream_figures,
        layer_stream_report,
    )


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / "bench_layer_stream.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == "no CUDA GPU is seen here, so there is nothing to measure\n"


def test_variants_are_read_as_they_are_written(benchmark: Modules) -> None:
    names = [*benchmark.variants.DEFAULTS, "8x64s2w1k4,copies-first,at-entry,3-sets"]
    assert [str(benchmark.variants.parse(name)) for name in names] == names
    assert len(set(names)) == len(names)


def test_the_first_variant_is_what_a_server_does(benchmark: Modules) -> None:
    variants = benchmark.variants
    assert variants.parse(variants.DEFAULTS[0]) == variants.Variant(variants.COUNTED_GRID)


@pytest.mark.parametrize("name", ["32", "32x2048s3w8,first", "32x2048s3w8,at-entry,copies-first"])
def test_what_names_no_variant_is_refused_in_one_line(benchmark: Modules, name: str) -> None:
    with pytest.raises(ValueError, match=r"^no variant is named .*as in 64x2048s3w8$") as error:
        benchmark.variants.parse(name)
    assert "\n" not in str(error.value)


class Queued:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def move(self, layer: int) -> None:
        self._gpu.queue(f"{self._name} {layer}")


@pytest.mark.parametrize("order", ["", ",at-entry", ",3-sets", ",at-entry,3-sets"])
def test_a_step_orders_what_shares_memory_and_nothing_else(
    benchmark: Modules, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(benchmark.step.torch, "cuda", gpu.as_torch_cuda)
    variant = benchmark.variants.parse("32x2048s3w8" + order)
    gather, scatter = (Queued(gpu, name) for name in ("gather", "scatter"))
    gathers = Stream()
    streams = benchmark.step.Streams(gathers, gathers if "at-entry" in order else Stream())
    copies = benchmark.step.Copies(gather, scatter, LAYERS, variant, streams)
    shape = benchmark.step.Shape(LAYERS, 16, heads=2, kv_heads=1, head_dim=8, intermediate=24)
    model = benchmark.step.Model(shape, 2, torch.device("cpu"))
    buffers = [torch.zeros(32, 1, 8, dtype=benchmark.step.DTYPE) for _ in range(variant.sets)]
    sets = benchmark.step.Sets(buffers, buffers)
    slots = torch.arange(32).view(2, 16)
    attention = benchmark.attention.sdpa(shape, slots, 16)
    attended = iter(range(LAYERS))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        gpu.queue(f"attend {next(attended)}")
        return attention(q, k, v)

    x = torch.randn(2, 16, dtype=benchmark.step.DTYPE)
    out = model.step(x, slots[:, -1].contiguous(), sets, attend, copies)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()
    assert set(gpu.before) == {
        f"{what} {layer}" for what in ("gather", "attend", "scatter") for layer in range(LAYERS)
    }
    for layer in range(LAYERS):
        assert gpu.ordered(f"gather {layer}", f"attend {layer}")
        assert gpu.ordered(f"attend {layer}", f"scatter {layer}")
        assert f"scatter {layer}" in gpu.main.done, "the capture is not joined"
    for layer in range(LAYERS - variant.sets):
        assert gpu.ordered(f"scatter {layer}", f"gather {layer + variant.sets}")
    for layer in range(LAYERS - 1):
        assert not gpu.ordered(f"gather {layer + 1}", f"attend {layer}")
        assert not gpu.ordered(f"attend {layer}", f"gather {layer + 1}")


class Captured:
    """Stands in for a CUDA graph: what is captured is run."""

    captures = 0

    def capture_begin(self) -> None:
        Captured.captures += 1

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
def test_a_run_times_every_variant_in_every_case(
    benchmark: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, variants = benchmark.figures, benchmark.variants
    gpu, cpu = Gpu(), torch.device("cpu")
    gpu.as_torch_cuda.CUDAGraph = Captured
    gpu.as_torch_cuda.synchronize = lambda: None
    gpu.as_torch_cuda.device = nullcontext
    monkeypatch.setattr(torch, "cuda", gpu.as_torch_cuda)
    monkeypatch.setattr(figures, "GPU", cpu)
    monkeypatch.setattr(benchmark.region, "GPU", cpu)
    small = benchmark.step.Shape(3, 16, heads=2, kv_heads=1, head_dim=8, intermediate=24)
    monkeypatch.setattr(figures, "Shape", lambda layers: small)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    region = benchmark.region.DonorRegion(memory, local=True)
    monkeypatch.setattr(figures, "take_region", lambda size: region)
    monkeypatch.setattr(figures, "time_alone", lambda call: SimpleNamespace(gpu_us=2000.0))
    plan = figures.Plan(
        variants=[
            variants.parse(n) for n in ("2x64s1w1", "2x64s1w1,at-entry", "2x64s1w1k2,3-sets")
        ],
        gigabytes=[5e-6, 0],
        batches=[1, 2],
        local_tokens=32,
        layers=3,
        distinct_layers=2,
        attention="sdpa",
        deadline_s=600,
        kernels=False,
    )
    measured = figures.Bench(plan).run()
    cases = [figures.Case(size, batch) for batch in (1, 2) for size in (5e-6, 0)]
    assert list(measured.compute_alone) == cases
    assert [(timed.variant, timed.case) for timed in measured.timed] == [
        (str(variant), case) for case in cases for variant in plan.variants
    ]
    assert measured.left_out == 0
    # three blocks of 1.5 KiB come nearest
    assert measured.streamed_bytes == {5e-6: 3 * 1536, 0: 0}
    # of copies alone, only what differs while nothing computes is timed, whatever the batch
    assert Captured.captures == len(cases) + len(measured.timed) + 2 * 2
    assert "/ floor" in benchmark.report.as_markdown(measured)

    late = figures.Bench(plan._replace(deadline_s=0)).run()
    assert late.timed == []
    assert late.left_out == len(measured.timed)


def test_the_report_has_every_figure(benchmark: Modules) -> None:
    small, large = (benchmark.figures.Case(gigabytes, 1) for gigabytes in (1, 10))
    timed = [
        benchmark.figures.Timed("slow", large, 30.0, 45.0),
        benchmark.figures.Timed("fast", large, 25.0, 30.0),
        benchmark.figures.Timed("slow", small, 4.0, 6.0),
    ]
    made_up = benchmark.figures.Figures(
        donor="made up",
        attention="sdpa",
        ceiling=400.0,
        streamed_bytes={1: 10**9, 10: 10**10},
        compute_alone={large: 8.0, small: 5.0},
        timed=timed,
        left_out=1,
        kernels={"compute alone": {"product": 5.0, "tiny": 0.01}, "slow": {"product": 9.0}},
    )
    lines = benchmark.report.as_markdown(made_up).splitlines()
    # the link's 25 ms, and the 5 ms of compute alone, are the floors
    summary = lines.index("| variant | worst | 10 GB, 1 | 1 GB, 1 |")
    assert lines[summary + 2 : summary + 4] == [
        "| fast | 1.20 | 1.20 |  |",
        "| slow | 1.80 | 1.80 | 1.20 |",
    ]
    assert "| slow | 30.00 | 333 | 45.00 | 222 | 1.80 |" in lines
    assert "| slow | 4.00 | 250 | 6.00 | 167 | 1.20 |" in lines
    assert "| product | 5.00 | 9.00 |" in lines
    assert not any("tiny" in line for line in lines)
    assert any("Left out" in line and "1 steps" in line for line in lines)
