"""Measures one server that is running already: what ``bench_multiturn`` and its sibling do."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.flags import (
    EXIT_BAD_INPUT,
    EXIT_INCOMPLETE,
    load_settings,
    request_rates,
    settings_note,
)
from swiftcache_bench.measure import measure
from swiftcache_bench.report.console import summary_lines
from swiftcache_bench.report.jsonl import append_run
from swiftcache_bench.server.api import flush_cache, served_model_path
from swiftcache_bench.workload.base import Workload

DEFAULT_RATE = 1.0


def add_server_flags(parser: ArgumentParser) -> None:
    """Which server, and where its figures go."""
    group = parser.add_argument_group("server and log")
    group.add_argument("--host", default="localhost")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument(
        "--model-path", help="of its vocabulary and tokenizer (default: what the server says)"
    )
    group.add_argument("--log-file", type=Path, default=Path("performance_metrics.jsonl"))
    group.add_argument("--tag", default="", help="kept with the figures in the log file")
    group.add_argument(
        "--disable-auto-run",
        action="store_true",
        help="without --request-rate, run at 1 request per second alone and not at a range",
    )


def run_script(
    args: Namespace,
    build: Callable[[Namespace, str], Workload],
    auto_run_rates: Sequence[float],
) -> int:
    """Build the workload, send it at each rate to a flushed server, print and log the figures.

    Returns the exit code: 0, 1 when a request was not answered whole, 2 for bad input.
    """
    try:
        url = f"http://{args.host}:{args.port}"
        workload = build(args, args.model_path or served_model_path(url))
        complete = True
        default = (DEFAULT_RATE,) if args.disable_auto_run else auto_run_rates
        for rate in request_rates(args, workload, default):
            settings = load_settings(args, workload, rate)
            flush_cache(url)
            _, figures = measure(url, workload, settings, args.request_timeout_s)
            print("\n".join(summary_lines(figures)), flush=True)
            append_run(args.log_file, args.tag, figures, settings_note(workload, settings))
            complete &= figures.complete
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0 if complete else EXIT_INCOMPLETE
