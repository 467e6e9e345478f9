"""Decode steps that stream their KV: how far copies and compute get in each other's way.

    python sgl-kernel/benchmark/bench_layer_stream.py [--gigabytes 14 1 4 0.5 0] [VARIANT ...]

Captures steps of stand-in layers of Qwen3-8B with the copies of the layer stream beside them, and
times compute alone, copies alone and both, for several grids, priorities and orders of the copies.
The pool is on cuda:0, the blocks on cuda:1, or on cuda:0 too where there is no peer. Prints
Markdown, with progress on stderr. About a minute, which leaves out what does not fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="as in 32x2048s3w8,copies-first; default: many",
    )
    parser.add_argument(
        "--gigabytes", type=float, nargs="+", default=[14, 1, 4, 0.5, 0], help="streamed in a step"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 16], help="requests in a step"
    )
    parser.add_argument("--local-tokens", type=int, default=6144, help="that are not streamed")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--distinct-layers", type=int, default=3, help="with weights of their own, taken in turn"
    )
    parser.add_argument(
        "--attention", choices=["auto", "fa3", "flashinfer", "sdpa"], default="auto"
    )
    parser.add_argument(
        "--seconds", type=float, default=75.0, help="after which cases are left out"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="tell each kernel's time, first size and batch"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU is seen here, so there is nothing to measure", file=sys.stderr)
        return 2
    # Imported late: they are of no use without a GPU.
    from donor_region import GPU
    from layer_stream_attention import first_that_works
    from layer_stream_figures import Bench, Plan
    from layer_stream_report import as_markdown
    from layer_stream_step import Shape
    from layer_stream_variants import DEFAULTS, parse

    try:
        variants = [parse(name) for name in arguments.variants or DEFAULTS]
    except ValueError as error:
        parser.error(str(error))
    attention = arguments.attention
    if attention == "auto":
        attention = first_that_works(Shape(arguments.layers), GPU)
    plan = Plan(
        variants=variants,
        gigabytes=arguments.gigabytes,
        batches=arguments.batches,
        local_tokens=arguments.local_tokens,
        layers=arguments.layers,
        distinct_layers=arguments.distinct_layers,
        attention=attention,
        deadline_s=arguments.seconds,
        kernels=arguments.kernels,
    )
    print(as_markdown(Bench(plan).run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
