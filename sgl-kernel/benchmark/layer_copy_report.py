"""The figures as Markdown and as one JSON document."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton
from layer_copy_figures import PATHS, Figures, Rates


def as_document(figures: Figures) -> dict[str, Any]:
    """Plain values for JSON."""
    document = {"run": _run(), **asdict(figures)}
    document["rates"] = [{**rates.case._asdict(), **asdict(rates)} for rates in figures.rates]
    for rates in document["rates"]:
        del rates["case"]
    document["left_out"] = [case._asdict() for case in figures.left_out]
    return document


def as_markdown(figures: Figures) -> str:
    lines = ["# Layer gather and scatter", ""]
    lines += [f"- {name}: {value}" for name, value in _run().items()]
    lines += [f"- donor memory: {figures.donor}"]
    lines += [
        f"- plain copy of 256 MiB, {way}: {rate:.0f} GB/s" for way, rate in figures.ceilings.items()
    ]
    lines += [f"- {figures.table}", f"- took {figures.seconds:.0f} s", ""]
    for gather, name in ((True, "gather"), (False, "scatter")):
        rates = [rates for rates in figures.rates if rates.case.gather == gather]
        lines += [f"## One layer, {name}, GB/s", "", *_rates(rates, figures.ceilings[name]), ""]
    if figures.left_out:
        lines += [f"Left out, as the time was over: {len(figures.left_out)} cases.", ""]
    lines += ["## Gather beside a matrix product, us", ""]
    lines += [f"The product alone takes {figures.product_alone_us:.0f} us.", ""]
    lines += ["The kernels move scattered blocks, the copy engine one run.", ""]
    lines += [*_slowdowns(figures), ""]
    lines += ["## What a layer costs the host, us", ""]
    lines += _table(["call", "us"], ([name, f"{us:.1f}"] for name, us in figures.host_us.items()))
    return "\n".join(lines)


def _rates(rates: Sequence[Rates], ceiling: float) -> Iterable[str]:
    header = ["model", "page", "order", "blocks", "MiB", "runs", "plain copy"]
    header += [f"kernel {path.programs}" if path.programs else "copy engine" for path in PATHS]
    header += ["best / plain", "best / ceiling", "auto", "auto / best"]
    rows = []
    for row in rates:
        case = row.case
        best = max(row.by_path.values())
        auto = row.by_path[row.auto]
        rows.append(
            [
                case.model,
                str(case.page_tokens),
                "scattered" if case.scattered else "in order",
                str(case.blocks),
                f"{row.mib:.0f}",
                str(row.runs),
                f"{row.plain_copy:.0f}",
                *(f"{row.by_path[str(path)]:.0f}" for path in PATHS),
                f"{best / row.plain_copy:.3f}",
                f"{best / ceiling:.3f}",
                row.auto,
                f"{auto / best:.3f}",
            ]
        )
    return _table(header, rows)


def _slowdowns(figures: Figures) -> Iterable[str]:
    header = ["path", "blocks", "alone", "beside it", "product", "product's delay"]
    rows = (
        [
            row.path,
            str(row.blocks),
            f"{row.alone:.0f}",
            f"{row.beside:.0f}",
            f"{row.product:.0f}",
            f"{row.product - figures.product_alone_us:+.0f}",
        ]
        for row in figures.slowdowns
    )
    return _table(header, rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    yield from (f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _run() -> dict[str, str]:
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return {
        "command": shlex.join(sys.argv),
        "GPUs": f"{torch.cuda.device_count()} x {', '.join(sorted(names))}",
        "versions": f"torch {torch.__version__}, Triton {triton.__version__}",
    }
