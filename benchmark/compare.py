"""Starts SGLang in several ways in turn, sends each the same requests, and compares.

Writes result.json, report.md and plots to --output-dir. See benchmark/README.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from swiftcache_bench.comparison import (
    ContenderOutcome,
    Plan,
    measure_attached,
    run_contender,
)
from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.flags import (
    EXIT_BAD_INPUT,
    EXIT_INCOMPLETE,
    add_load_flags,
    add_workload_flags,
    build_workload,
    load_settings,
    request_rates,
)
from swiftcache_bench.machine import describe_run
from swiftcache_bench.prefix_probe import ProbeSettings
from swiftcache_bench.report.document import comparison_document, write_document
from swiftcache_bench.report.markdown import comparison_page
from swiftcache_bench.report.plots import write_plots
from swiftcache_bench.server.attached import Attachment, parse_attachment
from swiftcache_bench.server.contender_server import LaunchSettings
from swiftcache_bench.server.contenders import (
    DEFAULT_DONORS,
    DEVICE_FLAGS,
    Contender,
    ContenderFile,
    built_in_entries,
    parse_contender,
    read_contender_file,
    resolve_contenders,
    split_flags,
)
from swiftcache_bench.server.processes import free_port
from swiftcache_bench.tokens import read_vocab_size, usable_ids

DEFAULT_RATES = (1.0,)
EXIT_TERMINATED = 128 + signal.SIGTERM


class Comparison(NamedTuple):
    """Everything that the command line and the file of contenders ask for."""

    contenders: list[Contender]
    attached: list[Attachment]
    baseline: str
    plan: Plan
    launch: LaunchSettings


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    group = parser.add_argument_group("contenders")
    group.add_argument("--model-path", required=True, help="of all contenders; also its vocabulary")
    group.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    group.add_argument("--config", type=Path, help="YAML file of contenders")
    group.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more contender, or other flags for one; {runtime_dir} and {tier_gb} are "
        "filled in",
    )
    group.add_argument(
        "--attach",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a server that runs already, measured as it is and left running; with it nothing "
        "else is started, unless --only names it",
    )
    group.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these, in order")
    group.add_argument("--server-args", default="", help="flags that all contenders share")
    group.add_argument(
        "--donors",
        nargs="+",
        metavar="SPEC",
        help="started for contenders that use {runtime_dir}, their size is HiCache's {tier_gb} too "
        "(default: cuda:1=40GiB, on the CPU host=256MiB)",
    )
    group.add_argument("--baseline", metavar="NAME", help="of the ratios (default: the first)")
    group.add_argument("--port", type=int, help="of the servers (default: a free one)")
    group.add_argument("--start-timeout-s", type=float, default=900.0)
    group.add_argument("--output-dir", type=Path, required=True)
    group.add_argument("--tag", default="", help="kept with the result")
    add_workload_flags(parser)
    add_load_flags(parser)
    group = parser.add_argument_group("beside the workload")
    group.add_argument(
        "--warmup-conversations",
        type=int,
        default=1,
        help="of the workload's shapes with other ids, sent first and not measured (default: 1)",
    )
    group.add_argument(
        "--probe-lengths",
        type=int,
        nargs="+",
        metavar="TOKENS",
        help="also time single prefixes: cold, on the device, pushed out of it",
    )
    group.add_argument("--probe-repeats", type=int, default=3)
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> Comparison:
    """Check the whole request before anything is started. Raises BenchmarkError."""
    file = read_contender_file(args.config) if args.config else ContenderFile()
    entries = built_in_entries(args.device) | file.contenders
    entries |= dict(parse_contender(text) for text in args.contender)
    donors = args.donors or file.donors or DEFAULT_DONORS[args.device]
    attached = [parse_attachment(text) for text in args.attach]
    started = args.only or not attached
    contenders = resolve_contenders(entries, donors, args.only) if started else []
    names = [each.name for each in attached] + [each.name for each in contenders]
    if len(set(names)) < len(names):
        raise BenchmarkError(f"two contenders have one name: {', '.join(sorted(names))}")
    baseline = args.baseline or file.baseline or names[0]
    if baseline not in names:
        raise BenchmarkError(f"no contender {baseline}: the baseline is one of {', '.join(names)}")
    workload = build_workload(args, args.model_path)
    rates = request_rates(args, workload, DEFAULT_RATES)
    probe = None
    if args.probe_lengths:
        probe = ProbeSettings(tuple(args.probe_lengths), args.probe_repeats, seed=args.seed)
    plan = Plan(
        workload,
        tuple(load_settings(args, workload, rate) for rate in rates),
        usable_ids(read_vocab_size(args.model_path)),
        args.request_timeout_s,
        args.warmup_conversations,
        probe,
    )
    common = split_flags(f"{file.server_args} {args.server_args}", "--server-args")
    launch = LaunchSettings(
        model_path=args.model_path,
        port=args.port or free_port(),
        log_dir=args.output_dir / "logs",
        common_flags=(*DEVICE_FLAGS[args.device], *common),
        start_timeout_s=args.start_timeout_s,
    )
    return Comparison(contenders, attached, baseline, plan, launch)


def run(comparison: Comparison, output_dir: Path, tag: str) -> int:
    """Measure all contenders; the result is written anew after each run. Returns the exit code."""
    output_dir.mkdir(parents=True, exist_ok=True)
    circumstances = {"tag": tag, **describe_run()}
    plan = comparison.plan
    measures = [partial(measure_attached, attachment, plan) for attachment in comparison.attached]
    measures += [
        partial(run_contender, contender, plan, comparison.launch)
        for contender in comparison.contenders
    ]
    outcomes: list[ContenderOutcome] = []

    def save(unfinished: ContenderOutcome | None = None) -> dict[str, Any]:
        known = outcomes if unfinished is None else [*outcomes, unfinished]
        document = comparison_document(circumstances, plan, known, comparison.baseline)
        write_document(output_dir / "result.json", document)
        (output_dir / "report.md").write_text(comparison_page(document, []))
        return document

    for measure_next in measures:
        outcomes.append(measure_next(log=log, save=save))
        document = save()
    try:
        plots = write_plots(document, output_dir)
    except BenchmarkError as error:
        log(str(error))
        plots = []
    page = comparison_page(document, plots)
    (output_dir / "report.md").write_text(page)
    print(page)
    return 0 if document["complete"] else EXIT_INCOMPLETE


def log(line: str) -> None:
    print(f"compare: {line}", file=sys.stderr, flush=True)


def main() -> int:
    args = parse_args()
    # Ends what is running too: by default the signal would leave servers and donors behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        return run(prepare(args), args.output_dir, args.tag)
    except BenchmarkError as error:
        log(str(error))
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
