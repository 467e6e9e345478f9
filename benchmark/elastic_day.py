"""A day in two minutes: two servers with opposite loads that lend each other what they can spare.

Starts both on the CPU engine with a tiny model, holds conversations with them that come and go as
over a day (one is busy while the other is quiet), samples what each lends, and then asks a server
that shares nothing the same: every answer must be the same. Writes a plot and the figures.

    PYTHONPATH=benchmark:test python benchmark/elastic_day.py --plot docs/elastic-day.svg
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from support.donors import Donor
from support.server import Server
from support.tiny_model import build_tiny_model

POOL_TOKENS = 4096
TOKEN_BYTES = 1024  # of the tiny model
CLIENTS = 6
TURNS = 4
FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 250, 40, 24
SAMPLE_S = 0.5
START_DEADLINE_S = 900.0
ENVIRONMENT = {
    "SWIFTCACHE_EXTENT_BYTES": "64KiB",
    "SWIFTCACHE_LEND_QUIET_S": "1",
    "SWIFTCACHE_COLD_AFTER_S": "2",
    "SWIFTCACHE_COLD_SCAN_S": "0.2",
}


class Sample(NamedTuple):
    """One server at one moment of the day."""

    second: float
    busy: float
    """Part of its clients that talk to it, by the curve."""
    lent_bytes: int
    borrowed_bytes: int


@dataclass
class Day:
    """One server's: what it was asked, what it answered, what it lent."""

    server: Server
    phase: float
    """0 is busy at noon, 0.5 at midnight; of the whole day."""
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def busy(self, second: float, day_s: float) -> float:
        return (1 - math.cos(2 * math.pi * (second / day_s + self.phase))) / 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--seconds", type=float, default=120.0, help="length of the day")
    parser.add_argument("--plot", type=Path, help="where the plot goes, as .svg or .png")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sc-day-") as folder:
        days, report = run(Path(folder), arguments.seconds)
    text = orjson.dumps(report, option=orjson.OPT_INDENT_2).decode()
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    if arguments.plot:
        plot(days, arguments.plot)
    return 0 if report["answers_that_differ"] == 0 else 1


def run(folder: Path, day_s: float) -> tuple[list[Day], dict[str, Any]]:
    """The day of both servers, and then the same questions to one that shares nothing."""
    model = build_tiny_model(folder / "model")
    runtime_dir = folder / "rt"
    common = ("--random-seed", "1", "--chunked-prefill-size", "512")
    sharing = (
        *("--max-total-tokens", str(POOL_TOKENS), *common, "--swiftcache-donors"),
        *("--swiftcache-donate", "auto", "--swiftcache-runtime-dir", str(runtime_dir)),
    )
    days = [
        Day(_server(model, folder, *sharing), phase=0.0),
        Day(_server(model, folder, *sharing), phase=0.5),
    ]
    servers = [day.server for day in days]
    # With a donor to be found neither starts one of its own, in which everything would fit.
    with Donor(runtime_dir, "seed", size="256KiB", extent_size="64KiB"):
        with ThreadPoolExecutor(2) as pair:
            try:
                list(pair.map(Server.start, servers))
                _live(days, day_s)
                donations = [server.swiftcache()["donation"] for server in servers]
            finally:
                for server in servers:
                    server.stop()
    with _server(model, folder, "--max-total-tokens", "65536", *common) as alone:
        differing = sum(_differing(day, alone) for day in days)
    return days, {
        "seconds": day_s,
        "answers": sum(len(day.answers) for day in days),
        "answers_that_differ": differing,
        "servers": [
            {
                "lent_against_load": round(_correlation(day, "lent_bytes"), 3),
                "borrowed_against_load": round(_correlation(day, "borrowed_bytes"), 3),
                "lent_mib_most": round(max(s.lent_bytes for s in day.samples) / (1 << 20), 2),
                "lent_mib_least": round(min(s.lent_bytes for s in day.samples) / (1 << 20), 2),
                "donation": donation,
            }
            for day, donation in zip(days, donations, strict=True)
        ],
    }


def plot(days: list[Day], path: Path) -> None:
    """Load and lent memory of both servers over the day."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(days), 1, sharex=True, figsize=(8, 5))
    pool_mib = POOL_TOKENS * TOKEN_BYTES / (1 << 20)
    for day, axis, name in zip(days, axes, "AB", strict=True):
        seconds = [sample.second for sample in day.samples]
        lent = [sample.lent_bytes / (1 << 20) for sample in day.samples]
        busy = [sample.busy * CLIENTS for sample in day.samples]
        axis.fill_between(seconds, lent, step="post", alpha=0.4, label="lent (MiB)")
        axis.set_ylabel(f"server {name}: MiB lent of {pool_mib:g}")
        axis.set_ylim(0, pool_mib)
        clients = axis.twinx()
        clients.plot(seconds, busy, color="tab:red", label="clients")
        clients.set_ylabel("clients", color="tab:red")
        clients.set_ylim(0, CLIENTS)
    axes[-1].set_xlabel("seconds")
    axes[0].set_title("Two servers with opposite loads lend each other their KV memory")
    figure.tight_layout()
    figure.savefig(path)


def _server(model: Path, folder: Path, *flags: str) -> Server:
    return Server(model, *flags, tmp_path=folder, env=ENVIRONMENT, deadline_s=START_DEADLINE_S)


def _live(days: list[Day], day_s: float) -> None:
    began_s = time.monotonic()
    clients = [
        threading.Thread(target=_client, args=(day, number, began_s, day_s))
        for day in days
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    while (second := time.monotonic() - began_s) < day_s:
        for day in days:
            state = day.server.swiftcache()
            borrowed = sum(d["bytes"] for d in state["donors"] if d["name"].startswith("engine"))
            day.samples.append(
                Sample(
                    second,
                    day.busy(second, day_s),
                    state["donation"]["lent_bytes"],
                    borrowed,
                )
            )
        time.sleep(SAMPLE_S)
    for client in clients:
        client.join()


def _client(day: Day, number: int, began_s: float, day_s: float) -> None:
    """One conversation after the other, as long as it is this client's time of day."""
    rng = random.Random(1000 * number + int(10 * day.phase))
    while (second := time.monotonic() - began_s) < day_s:
        if day.busy(second, day_s) * CLIENTS <= number + 0.5:
            time.sleep(0.1)
            continue
        history = [rng.randrange(10, 500) for _ in range(FIRST_TOKENS)]
        for _ in range(TURNS):
            (answer,) = day.server.generate(history, OUTPUT_TOKENS)
            output = list(answer["output_ids"])
            day.answers[tuple(history)] = output
            history += output + [rng.randrange(10, 500) for _ in range(NEW_TOKENS)]


def _differing(day: Day, alone: Server) -> int:
    """Answers that are not what a server says that shares nothing."""
    return sum(
        list(alone.generate(list(prompt), OUTPUT_TOKENS)[0]["output_ids"]) != output
        for prompt, output in day.answers.items()
    )


def _correlation(day: Day, field_name: str) -> float:
    """Of what was sampled with the server's own load: near -1 if it goes against it."""
    busy = [sample.busy for sample in day.samples]
    values = [float(getattr(sample, field_name)) for sample in day.samples]
    if len(set(values)) < 2:
        return 0.0
    return statistics.correlation(busy, values)


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    raise SystemExit(main())
