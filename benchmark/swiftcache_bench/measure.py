"""One run: a workload, sent to one server in one way, and the figures of it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from swiftcache_bench.client import Client
from swiftcache_bench.load import LoadResult, LoadSettings, run_load
from swiftcache_bench.report.console import ProgressLines
from swiftcache_bench.statistics import RunFigures, run_figures
from swiftcache_bench.workload.base import Workload


class Measured(NamedTuple):
    """Every request of a run, and its figures."""

    result: LoadResult
    figures: RunFigures


def measure(
    url: str, workload: Workload, settings: LoadSettings, request_timeout_s: float
) -> Measured:
    """Send ``workload`` to the server at ``url``. Raises BenchmarkError for unfit settings."""

    async def run() -> LoadResult:
        async with Client(url, request_timeout_s) as client:
            return await run_load(client, workload, settings, ProgressLines(workload.requests))

    result = asyncio.run(run())
    rate = None if settings.arrivals == "trace" else settings.request_rate
    return Measured(result, run_figures(result, rate))
