"""Bandwidth of layer gather and scatter against the plain copy between two GPUs.

    python sgl-kernel/benchmark/bench_layer_copy.py [--json FILE]

The pool is on cuda:0, the blocks on cuda:1, or on cuda:0 too where there is no peer. Measures in
one run what a plain copy reaches, what the kernels with several grids and the copy engine reach
alone and beside a matrix product, and what a layer costs the host. Prints Markdown, with progress
on stderr. A minute and a half at most, which leaves out what does not fit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA GPU is seen here, so there is nothing to measure", file=sys.stderr)
        return 2
    # Imported late: they are of no use without a GPU.
    from layer_copy_figures import Bench
    from layer_copy_report import as_document, as_markdown

    figures = Bench().run()
    print(as_markdown(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(as_document(figures), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
