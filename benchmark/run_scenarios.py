"""Runs the scenarios of a file: several servers and donors at once, under loads of their own.

    python benchmark/run_scenarios.py benchmark/four_gpus.yaml --output-dir out

Writes NAME.json for each scenario and report.md to --output-dir, and with --write-docs the same
tables into a page. Scenarios that an earlier run with the same --output-dir has measured stay in
the report. See benchmark/README.md.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.flags import EXIT_BAD_INPUT, EXIT_INCOMPLETE
from swiftcache_bench.machine import describe_run
from swiftcache_bench.report.document import write_document
from swiftcache_bench.scenario.document import scenario_document
from swiftcache_bench.scenario.file import Command, ScenarioFile, read_scenario_file
from swiftcache_bench.scenario.page import report_page, write_between_marks
from swiftcache_bench.scenario.runner import Budget, VariantOutcome, run_variant

REPOSITORY = Path(__file__).resolve().parents[1]
EXIT_TERMINATED = 128 + signal.SIGTERM


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="these scenarios and commands; SCENARIO:VARIANT for one variant, the others are kept",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another value for a variable of the file; may be given several times",
    )
    parser.add_argument("--budget-s", type=float, help="instead of the file's own")
    parser.add_argument(
        "--write-docs",
        type=Path,
        metavar="PAGE",
        help="also put the tables between the marks of this file's name in PAGE",
    )
    parser.add_argument("--tag", default="", help="kept with the result")
    return parser.parse_args()


def run(args: argparse.Namespace, file: ScenarioFile) -> bool:
    """Measure what was asked for; returns whether all of it was measured."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    budget = Budget(args.budget_s or file.budget_s)
    circumstances = {"tag": args.tag, **describe_run()}
    chosen = args.only or [*file.scenarios, *file.commands]
    complete = True
    for chosen_name in chosen:
        name, _, only_variant = chosen_name.partition(":")
        path = args.output_dir / f"{name}.json"
        if name in file.commands:
            document = {**circumstances, **run_command(file.commands[name], budget)}
            write_document(path, document)
            _write_report(args, file)
        else:
            scenario = file.scenarios[name]
            kept = orjson.loads(path.read_bytes()) if only_variant and path.exists() else None
            outcomes: dict[str, VariantOutcome] = {}
            for of in [only_variant] if only_variant else scenario.variants:
                folder = args.output_dir / "logs" / name / of
                variant = scenario.variants[of]
                outcomes[of] = run_variant(variant, scenario, file, folder, budget, log)
                document = scenario_document(circumstances, scenario, outcomes, kept)
                write_document(path, document)
                _write_report(args, file)
        complete &= document["complete"]
    print((args.output_dir / "report.md").read_text())
    return complete


def run_command(command: Command, budget: Budget) -> dict[str, Any]:
    """The document of a script that measures by itself."""
    result: dict[str, Any] = {"title": command.title, "command_line": command.command}
    try:
        budget.require(command.limit_s, command.title)
        log(command.command)
        done = subprocess.run(
            shlex.split(command.command.replace("{python}", sys.executable)),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=command.limit_s,
            check=False,
        )
    except (BenchmarkError, OSError, subprocess.TimeoutExpired) as error:
        return result | {"complete": False, "text": "", "error": str(error)}
    problem = None
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        problem = f"exit code {done.returncode}; it said: {said}"
    return result | {"complete": problem is None, "text": done.stdout, "error": problem}


def _write_report(args: argparse.Namespace, file: ScenarioFile) -> None:
    """From all that lies in the folder, in the order of the file."""
    paths = [args.output_dir / f"{name}.json" for name in (*file.scenarios, *file.commands)]
    documents = [orjson.loads(path.read_bytes()) for path in paths if path.exists()]
    page = report_page(documents)
    (args.output_dir / "report.md").write_text(page)
    if args.write_docs is not None:
        write_between_marks(args.write_docs, args.file.stem, page)


def log(line: str) -> None:
    print(f"scenarios: {line}", file=sys.stderr, flush=True)


def main() -> int:
    args = parse_args()
    # Ends what is running too: by default the signal would leave servers and donors behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        variables = dict(_assignment(text) for text in args.set)
        file = read_scenario_file(args.file, variables)
        names = [*file.scenarios, *file.commands]
        names += [f"{name}:{of}" for name, s in file.scenarios.items() for of in s.variants]
        if unknown := [name for name in args.only or [] if name not in names]:
            raise BenchmarkError(f"no scenario {unknown[0]}: expected any of {', '.join(names)}")
        return 0 if run(args, file) else EXIT_INCOMPLETE
    except BenchmarkError as error:
        log(str(error))
        return EXIT_BAD_INPUT


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise BenchmarkError(f"--set {text} is not of the form NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
