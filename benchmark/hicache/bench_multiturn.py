"""Multi-turn conversations against a running SGLang server: TTFT, ITL, throughput, cache hits.

The flags and figures of SGLang's ``benchmark/hicache/bench_multiturn.py``, on data sets too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from swiftcache_bench.flags import add_load_flags, add_workload_flags, build_workload
from swiftcache_bench.single_server import add_server_flags, run_script

AUTO_RUN_RATES = (16.0, 14.0, 12.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_server_flags(parser)
    add_workload_flags(parser)
    add_load_flags(parser)
    return run_script(parser.parse_args(), build_workload, AUTO_RUN_RATES)


if __name__ == "__main__":
    sys.exit(main())
