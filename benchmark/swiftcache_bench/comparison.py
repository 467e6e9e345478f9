"""Runs the contenders one after another on this machine and keeps what each of them did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.load import LoadSettings
from swiftcache_bench.measure import measure
from swiftcache_bench.prefix_probe import ProbeResult, ProbeSettings, probe_prefixes
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.server.api import flush_cache
from swiftcache_bench.server.attached import AttachedServer, Attachment
from swiftcache_bench.server.contender_server import ContenderServer, LaunchSettings
from swiftcache_bench.server.contenders import Contender
from swiftcache_bench.server.identity import FlagCheck
from swiftcache_bench.statistics import RunFigures
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.base import Workload, same_shape

# Of the warm-up's ids; that of a workload is the user's.
WARM_UP_SEED = 0x5EED

Log = Callable[[str], None]
Save = Callable[["ContenderOutcome"], object]
"""Called with what is known of a contender after each of its runs, so that a comparison that is cut
off loses no more than the run it was in."""


@dataclass(frozen=True)
class Plan:
    """What each contender is put through: a warm-up, the workload at each rate, the probe.

    ``loads`` has one setting per rate. The warm-up sends a conversation of the workload with other
    ids, one request at a time, and then ``warmup_conversations`` of them, as many at once as the
    first load allows, so that what compiles at first use, by shape, has compiled.
    """

    workload: Workload
    loads: tuple[LoadSettings, ...]
    ids: IdRange
    request_timeout_s: float
    warmup_conversations: int = 1
    probe: ProbeSettings | None = None


class MeasuredServer(Protocol):
    """A server that a plan can be run on."""

    url: str

    def check(self) -> dict[str, Any]:
        """``/server_info`` of this very server. Raises BenchmarkError when another answers."""


@dataclass(frozen=True)
class RunOutcome:
    """One workload run: how it was sent, its figures, all of its requests."""

    load: LoadSettings
    figures: RunFigures
    requests: list[RequestRecord]


@dataclass
class ContenderOutcome:
    """What became of a contender. ``error`` says why it ended early; its runs before that count."""

    name: str
    command: list[str]
    donors: list[str]
    error: str | None = None
    flags: FlagCheck | None = None
    pool_tokens: int | None = None
    runs: list[RunOutcome] = field(default_factory=list)
    probe: ProbeResult | None = None

    @property
    def complete(self) -> bool:
        probed = self.probe is None or self.probe.complete
        return self.error is None and probed and all(run.figures.complete for run in self.runs)


def run_contender(
    contender: Contender, plan: Plan, launch: LaunchSettings, log: Log, save: Save
) -> ContenderOutcome:
    """Start ``contender``, put it through ``plan``, end it. Its own failures are in the outcome.

    Its logs go to a folder of its name in ``launch.log_dir``. Raises BenchmarkError when it could
    not be ended, since nothing can be measured after that.
    """
    launch = replace(launch, log_dir=launch.log_dir / _folder_name(contender.name))
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    server = ContenderServer(contender, launch)
    outcome = ContenderOutcome(
        contender.name,
        command=[],
        donors=[str(spec) for spec in contender.donors] if contender.uses_donors else [],
    )
    log(f"{contender.name}: starting (log: {server.log_path})")
    with server:
        try:
            outcome.command = server.command
            server.start()
            outcome.flags = server.flag_check
            _run_plan(server, plan, outcome, log, save)
        except BenchmarkError as error:
            outcome.error = str(error)
            log(f"{contender.name}: failed: {error}")
    log(f"{contender.name}: ended, port {launch.port} is free")
    return outcome


def measure_attached(attachment: Attachment, plan: Plan, log: Log, save: Save) -> ContenderOutcome:
    """Put a server that runs already through ``plan``; it is left running."""
    outcome = ContenderOutcome(attachment.name, command=[], donors=[])
    try:
        _run_plan(AttachedServer(*attachment), plan, outcome, log, save)
    except BenchmarkError as error:
        outcome.error = str(error)
        log(f"{attachment.name}: failed: {error}")
    return outcome


def _run_plan(
    server: MeasuredServer, plan: Plan, outcome: ContenderOutcome, log: Log, save: Save
) -> None:
    info = server.check()
    outcome.pool_tokens = info.get("max_total_num_tokens")
    _warm_up(server.url, plan, outcome.name, log)
    for load in plan.loads:
        flush_cache(server.url)
        log(f"{outcome.name}: {plan.workload.requests} requests, {describe_load(load)}")
        result, figures = measure(server.url, plan.workload, load, plan.request_timeout_s)
        outcome.runs.append(RunOutcome(load, figures, result.records))
        save(outcome)
        server.check()
    if plan.probe is not None:
        flush_cache(server.url)
        log(f"{outcome.name}: prefixes of {', '.join(map(str, plan.probe.lengths))} tokens")
        outcome.probe = probe_prefixes(
            server.url,
            plan.probe,
            plan.ids,
            pool_tokens=_number(info, "max_total_num_tokens"),
            max_prompt_tokens=_number(info, "max_req_input_len"),
            request_timeout_s=plan.request_timeout_s,
        )
        server.check()


def _warm_up(url: str, plan: Plan, name: str, log: Log) -> None:
    at_once = plan.loads[0].max_parallel if plan.loads else 1
    conversations = plan.warmup_conversations
    for repeat, (sent, parallel) in enumerate(
        [(min(1, conversations), 1), (conversations, at_once)]
    ):
        workload = same_shape(plan.workload, sent, plan.ids, WARM_UP_SEED + repeat)
        if not workload.requests:
            return
        log(f"{name}: warm-up, {workload.requests} requests, {parallel or 'all'} at once")
        closed_loop = LoadSettings(request_rate=float("inf"), max_parallel=parallel)
        figures = measure(url, workload, closed_loop, plan.request_timeout_s).figures
        if not figures.complete:
            errors = "; ".join(figures.errors)
            raise BenchmarkError(f"the warm-up of {name!r} failed: {errors}")


def describe_load(load: LoadSettings) -> str:
    """How requests come, in a few words."""
    if load.arrivals == "trace":
        return "at the times of the trace"
    if math.isinf(load.request_rate):
        return f"closed loop, {load.max_parallel} at once"
    return f"{load.request_rate:g} requests/s, {load.distribution}, by {load.arrivals}"


def _number(info: dict[str, Any], name: str) -> int:
    value = info.get(name)
    if not isinstance(value, int):
        raise BenchmarkError(f"/server_info has no {name}: the prefix probe needs it")
    return value


def _folder_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
