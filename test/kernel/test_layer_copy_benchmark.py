"""What of the bandwidth benchmark runs without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from swiftcache_kernel import TWO_H200S, BlockLayout

FOLDER = Path(__file__).resolve().parents[2] / "sgl-kernel/benchmark"


class Modules(NamedTuple):
    region: ModuleType
    figures: ModuleType
    report: ModuleType


@pytest.fixture(scope="module")
def benchmark() -> Modules:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import donor_region
        import layer_copy_figures
        import layer_copy_report
    return Modules(donor_region, layer_copy_figures, layer_copy_report)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("bench_layer_copy.py", "no CUDA GPU is seen here, so there is nothing to measure\n"),
        ("bench_many_donors.py", "0 CUDA GPUs are seen here: this needs two or more\n"),
    ],
)
def test_without_a_gpu_it_says_so_in_one_line(script: str, said: str) -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / script)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr == said


@pytest.mark.parametrize("scattered", [False, True])
def test_batches_are_distinct_bytes_of_the_region(
    benchmark: Modules, monkeypatch: pytest.MonkeyPatch, scattered: bool
) -> None:
    monkeypatch.setattr(benchmark.region, "GPU", torch.device("cpu"))
    layout = BlockLayout(layers=5, page_tokens=2, k_token_bytes=8, v_token_bytes=8)
    memory = torch.zeros(40 * layout.block_bytes + 3, dtype=torch.uint8)
    region = benchmark.region.DonorRegion(memory, local=True)
    for blocks, runs in ((40, 1), (100, 3), (200, 5)):
        table, pages, cut = region.batch(layout, blocks, scattered=scattered)
        assert sorted(pages.tolist()) == list(range(blocks))
        starts = np.sort(table.numpy()) - memory.data_ptr()
        assert starts[0] >= 0
        assert starts[-1] + layout.layer_bytes <= len(memory)
        assert np.diff(starts).min() >= layout.layer_bytes
        assert np.array_equal(cut.addresses, table.numpy())
        assert np.array_equal(cut.pages, pages.numpy())
        assert (len(cut) == runs) == (not scattered)
    with pytest.raises(ValueError, match="201 blocks do not fit"):
        region.batch(layout, 201, scattered=scattered)


def test_the_report_has_every_figure(benchmark: Modules) -> None:
    figures = benchmark.figures
    rates = [
        figures.Rates(
            case=case,
            mib=case.blocks / 16,
            runs=case.blocks,
            plain_copy=400.0,
            by_path={str(path): 100.0 + i for i, path in enumerate(figures.PATHS)},
            auto=str(figures.PATHS[0]),
        )
        for case in figures.cases()
    ]
    made_up = figures.Figures(
        donor="made up",
        ceilings={"gather": 416.0, "scatter": 208.0},
        table=TWO_H200S,
        rates=rates[:-1],
        left_out=[rates[-1].case],
        product_alone_us=1000.0,
        slowdowns=[figures.Slowdown("copy engine", 256, 50.0, 60.0, 1012.0)],
        host_us={"gather, kernel": 7.25},
        seconds=12.0,
    )
    lines = benchmark.report.as_markdown(made_up).splitlines()
    rows = [line for line in lines if line.startswith("| Qwen3-")]
    assert len(rows) == len(rates) - 1
    assert rows[0].startswith("| Qwen3-8B | 16 | scattered | 64 | 4 | 64 | 400 | 100 | 101 |")
    assert rows[0].endswith("| 104 | 0.260 | 0.250 | kernel with 8 programs | 0.962 |")
    assert rows[-1].endswith("| 0.260 | 0.500 | kernel with 8 programs | 0.962 |")
    assert "| copy engine | 256 | 50 | 60 | 1012 | +12 |" in lines
    assert "| gather, kernel | 7.2 |" in lines
    assert any("Left out" in line and "1 cases" in line for line in lines)

    document = json.loads(json.dumps(benchmark.report.as_document(made_up)))
    assert len(document["rates"]) == len(rows)
    assert document["rates"][0]["model"] == "Qwen3-8B"
    assert document["left_out"][0]["blocks"] == 16384
