"""`swiftcache exporter`: what donors say of themselves, for Prometheus.

A server's own `/metrics` have the receiver's side. A donor has no HTTP port, and a receiver that
hangs cannot report itself, so extents that are orphaned or overdue are only seen from here.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftcache_tier.cli.arguments import add_runtime_dir, port
from swiftcache_tier.cli.status import DonorReport, ask_all
from swiftcache_tier.control.runtime_dir import check_runtime_dir
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.lease import LeaseState
from swiftcache_tier.settings import Settings

_TAKING_BACK = ("draining", "drained")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "exporter",
        help="serve the state of all donors to Prometheus",
        description="Serve the state of all donors of the runtime directory at /metrics, until "
        "SIGTERM or SIGINT. Donors are asked at each scrape.",
    )
    parser.add_argument("--port", type=port, default=9090, help="default: %(default)s")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 lets other machines scrape (default: %(default)s)",
    )
    add_runtime_dir(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = Settings.from_env()
    check_runtime_dir(arguments.runtime_dir)
    registry = CollectorRegistry()
    registry.register(DonorCollector(arguments.runtime_dir, settings))
    try:
        server, thread = start_http_server(arguments.port, arguments.host, registry)
    # UnicodeError: a host such as a..b
    except (OSError, UnicodeError) as error:
        raise SwiftCacheError(
            f"cannot listen on {arguments.host}:{arguments.port} ({error}): choose another with "
            f"--port or --host, or end what listens there"
        ) from error
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    print(
        f"swiftcache exporter: http://{arguments.host}:{server.server_port}/metrics, donors of "
        f"{arguments.runtime_dir}",
        flush=True,
    )
    end.wait()
    server.shutdown()
    server.server_close()
    thread.join()
    return 0


class DonorCollector(Collector):
    """Asks the donors when it is scraped, so that one which has left is gone from the answer."""

    def __init__(self, runtime_dir: Path, settings: Settings) -> None:
        self._runtime_dir = runtime_dir
        self._settings = settings

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked when the collector is registered."""
        return _families([])

    def collect(self) -> Iterator[Metric]:
        yield from _families(ask_all(self._runtime_dir, self._settings))


def _families(reports: list[DonorReport]) -> Iterator[Metric]:
    found = GaugeMetricFamily("swiftcache_donors_found", "Donors in the runtime directory.")
    found.add_metric([], len(reports))
    yield found

    up = GaugeMetricFamily(
        "swiftcache_donor_up",
        "1 if the donor answers; 0 if only its socket is left, or its lending has failed.",
        labels=["donor"],
    )
    draining = GaugeMetricFamily(
        "swiftcache_donor_draining",
        "1 if the donor takes, or has taken, all its memory back.",
        labels=["donor"],
    )
    extents = GaugeMetricFamily(
        "swiftcache_donor_extents",
        "Extents of a donor by the state of their lease. orphaned: their receiver is silent; "
        "degraded: asked back and overdue.",
        labels=["donor", "state"],
    )
    extent_bytes = GaugeMetricFamily(
        "swiftcache_donor_extent_bytes", "Size of each extent of a donor.", labels=["donor"]
    )
    held = GaugeMetricFamily(
        "swiftcache_donor_receiver_bytes", "What a receiver holds.", labels=["donor", "receiver"]
    )
    silence = GaugeMetricFamily(
        "swiftcache_donor_receiver_silence_seconds",
        "Since the last sign of life of a receiver.",
        labels=["donor", "receiver"],
    )
    for report in reports:
        name, reply = report.paths.name, report.reply
        up.add_metric([name], reply is not None and report.state != "failed")
        if reply is None:
            continue
        draining.add_metric([name], report.state in _TAKING_BACK)
        for state in LeaseState:  # at zero, whether or not an extent has ever been in it
            extents.add_metric([name, state], reply.extents.get(state, 0))
        extent_bytes.add_metric([name], reply.extent_bytes)
        for receiver in reply.receivers:
            labels = [name, f"{receiver.name} ({receiver.pid})"]
            held.add_metric(labels, receiver.bytes)
            silence.add_metric(labels, receiver.heartbeat_age_s)
    yield from (up, draining, extents, extent_bytes, held, silence)
