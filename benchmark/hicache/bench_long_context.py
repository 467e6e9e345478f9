"""Questions on long contexts against a running SGLang server; each is a request of its own.

The flags and figures of SGLang's ``benchmark/hicache/bench_long_context.py``; without a data set,
contexts of random token ids with several questions each.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swiftcache_bench.flags import add_load_flags, add_workload_flags, build_context_workload
from swiftcache_bench.single_server import add_server_flags, run_script

AUTO_RUN_RATES = (24.0, 16.0, 12.0, 8.0, 4.0, 2.0, 1.0)
CONTEXT_TOKENS = 16384
QUESTION_TOKENS = 128
MAX_PARALLEL = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_server_flags(parser)
    add_workload_flags(parser, request_length=CONTEXT_TOKENS, question_length=QUESTION_TOKENS)
    add_load_flags(parser, max_parallel=MAX_PARALLEL)
    parser.add_argument(
        "--queries-per-context",
        type=int,
        default=4,
        help="of generated contexts; there are --num-clients queries in all (default: 4)",
    )
    args = parser.parse_args()
    build = partial(build_context_workload, queries=max(1, args.queries_per_context))
    return run_script(args, build, AUTO_RUN_RATES)


if __name__ == "__main__":
    sys.exit(main())
