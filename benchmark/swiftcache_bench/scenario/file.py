"""A file of scenarios: which servers run together, what each is sent, what is compared."""

from __future__ import annotations

import string
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import yaml
from msgspec import Meta

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.flags import add_load_flags, add_workload_flags
from swiftcache_bench.server.contenders import split_flags
from swiftcache_tier.cluster.config import DonorEntry, ServerEntry

_Seconds = Annotated[float, Meta(gt=0)]

DUMMY_PREFIX = "dummy:"
"""`model: dummy:Qwen3-8B` is a folder of those shapes, without weights, made for the run."""


class Variant(msgspec.Struct, forbid_unknown_fields=True):
    """Processes that run together. `donors` are of plain memory, and start before the servers."""

    servers: dict[str, ServerEntry]
    donors: dict[str, DonorEntry] = {}


class Loss(msgspec.Struct, forbid_unknown_fields=True):
    """A donor of plain memory is killed `after_s` the window's measured part has begun."""

    donor: str
    after_s: _Seconds


class Window(msgspec.Struct, forbid_unknown_fields=True):
    """What is sent at the same time, from a flushed cache on.

    `loads` and `background` name a load for each server; `flags` are added to those of `loads`. It
    ends when all `loads` are through or after `limit_s`; what is under way then is not counted.
    `background` goes on, again and again, for as long. Windows of one name are pooled.
    """

    name: str
    loads: dict[str, str]
    background: dict[str, str] = {}
    flags: str = ""
    limit_s: _Seconds = 60.0
    lose: Loss | None = None


class Against(msgspec.Struct, forbid_unknown_fields=True):
    """What ratios are taken to: the same window of another variant, or another window."""

    variant: str | None = None
    window: str | None = None


class Command(msgspec.Struct, forbid_unknown_fields=True):
    """A script that measures by itself; what it prints is its table. Runs in the repository."""

    title: str
    command: str
    limit_s: _Seconds


class Scenario(msgspec.Struct, forbid_unknown_fields=True):
    """Every variant is started once and put through all windows, in order."""

    title: str
    variants: dict[str, Variant]
    windows: list[Window]
    against: Against = msgspec.field(default_factory=Against)


class ScenarioFile(msgspec.Struct, forbid_unknown_fields=True):
    """`expected_start_s`: what a variant takes to start, for the estimate of the whole.

    `variables` may be used as $NAME anywhere in the file, and be given other values for a run;
    `shared` is for YAML anchors.
    """

    budget_s: _Seconds
    start_timeout_s: _Seconds
    expected_start_s: _Seconds
    scenarios: dict[str, Scenario] = {}
    commands: dict[str, Command] = {}
    loads: dict[str, str] = {}
    args: str = ""
    env: dict[str, str] = {}
    variables: dict[str, str] = {}
    shared: Any = None

    def expected_s(self) -> float:
        """All starts as expected, all windows and commands to their limits."""
        starts = sum(len(scenario.variants) for scenario in self.scenarios.values())
        windows = sum(
            len(scenario.variants) * sum(window.limit_s for window in scenario.windows)
            for scenario in self.scenarios.values()
        )
        commands = sum(command.limit_s for command in self.commands.values())
        return starts * self.expected_start_s + windows + commands


def read_scenario_file(path: Path, variables: Mapping[str, str]) -> ScenarioFile:
    """The file with `variables` in place of its own. Raises BenchmarkError naming what is wrong."""
    try:
        text = path.read_text()
        own = (yaml.safe_load(text) or {}).get("variables") or {}
        if unknown := sorted(variables.keys() - own.keys()):
            raise BenchmarkError(f"{path} has no variable {unknown[0]}: it has {', '.join(own)}")
        filled = string.Template(text).substitute({**own, **variables})
        file = msgspec.yaml.decode(filled, type=ScenarioFile)
        _check(file)
    except OSError as error:
        raise BenchmarkError(f"cannot read {path} ({error.strerror}): name a YAML file") from None
    except KeyError as error:
        raise BenchmarkError(f"{path} uses ${error.args[0]}, which `variables` lacks") from None
    except (yaml.YAMLError, msgspec.DecodeError, AttributeError, ValueError) as error:
        raise BenchmarkError(f"{path}: {' '.join(str(error).split())}") from None
    return file


def parse_load(flags: str) -> Namespace:
    """The flags of a load: those of `bench_multiturn` for workload and load. BenchmarkError."""
    parser = _Parser(add_help=False)
    add_workload_flags(parser)
    add_load_flags(parser)
    return parser.parse_args(list(split_flags(flags, "load")))


def load_flags(file: ScenarioFile, window: Window, name: str, *, background: bool) -> str:
    """Of the load `name` in this window."""
    return file.loads[name] if background else f"{file.loads[name]} {window.flags}"


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchmarkError(f"a load's flags: {message}")


def _check(file: ScenarioFile) -> None:
    for name, scenario in file.scenarios.items():
        where = f"scenario {name!r}"
        windows = {window.name for window in scenario.windows}
        if scenario.against.variant not in (None, *scenario.variants):
            raise ValueError(f"{where} compares with variant {scenario.against.variant!r}")
        if scenario.against.window not in (None, *windows):
            raise ValueError(f"{where} compares with window {scenario.against.window!r}")
        for window in scenario.windows:
            _check_window(file, scenario, window, f"{where}, window {window.name!r}")


def _check_window(file: ScenarioFile, scenario: Scenario, window: Window, where: str) -> None:
    if not window.loads:
        raise ValueError(f"{where} has no loads")
    for loads, background in ((window.loads, False), (window.background, True)):
        for load in loads.values():
            if load not in file.loads:
                raise ValueError(
                    f"{where}: no load {load!r}, expected any of {', '.join(file.loads)}"
                )
            parse_load(load_flags(file, window, load, background=background))
    for name, variant in scenario.variants.items():
        for server in (*window.loads, *window.background):
            if server not in variant.servers:
                raise ValueError(f"{where} loads {server!r}, which variant {name!r} lacks")
        if window.lose is not None and window.lose.donor not in variant.donors:
            raise ValueError(f"{where} loses {window.lose.donor!r}, which variant {name!r} lacks")
