"""Records and outcomes of runs that never took place."""

from __future__ import annotations

from typing import Any

import numpy as np

from swiftcache_bench.client import Status
from swiftcache_bench.comparison import ContenderOutcome, Plan, RunOutcome
from swiftcache_bench.load import LoadResult, LoadSettings
from swiftcache_bench.prefix_probe import Phase, ProbeRecord, ProbeResult
from swiftcache_bench.records import RequestRecord
from swiftcache_bench.statistics import run_figures
from swiftcache_bench.tokens import IdRange
from swiftcache_bench.workload.base import Conversation, Turn, Workload

RUN: dict[str, object] = {
    "tag": "",
    "created": "2020-01-01T00:00:00+00:00",
    "command": "python compare.py",
    "commit": "abc",
    "machine": {
        "cpu": "a|b",
        "cpu_cores": 2,
        "memory_bytes": 1 << 30,
        "gpus": [],
        "system": "x",
    },
    "versions": {"python": "3.11"},
}
LOAD = LoadSettings(request_rate=2.0)


def record(conversation: int = 0, round_number: int = 0, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "conversation": conversation,
        "round": round_number,
        "measured": True,
        "status": Status.OK,
        "error": None,
        "due_s": 0.0,
        "sent_s": 0.0,
        "ttft_s": 1.0,
        "latency_s": 2.0,
        "itl_s": (0.5, 0.5),
        "prompt_tokens": 100,
        "prefix_tokens": 50,
        "output_tokens": 3,
        "cached_tokens": 0,
        "device_tokens": 0,
        "host_tokens": 0,
        "prompt_digest": f"prompt {conversation} {round_number}",
        "output_digest": f"output {conversation} {round_number}",
    }
    return RequestRecord(**(fields | changes))


def failed(conversation: int = 0, round_number: int = 0, **changes: Any) -> RequestRecord:
    nothing = {"ttft_s": None, "latency_s": None, "itl_s": (), "output_digest": None}
    why = {"status": Status.FAILED, "error": "went wrong", "output_tokens": 0}
    return record(conversation, round_number, **(nothing | why | changes))


def outcome(name: str, records: list[RequestRecord], skipped: int = 0) -> ContenderOutcome:
    figures = run_figures(LoadResult(records, skipped), LOAD.request_rate)
    return ContenderOutcome(
        name, ["serve", name], [], pool_tokens=1000, runs=[RunOutcome(LOAD, figures, records)]
    )


def probe(times: dict[Phase, float], host_tokens: int) -> ProbeResult:
    """One length of 64 tokens; each phase's TTFT in seconds."""
    records = [
        ProbeRecord(
            64,
            0,
            phase,
            record(ttft_s=ttft_s, host_tokens=host_tokens if phase == "evicted" else 0),
        )
        for phase, ttft_s in times.items()
    ]
    return ProbeResult(records, fillers=3, failed_fillers=0)


def plan() -> Plan:
    turn = Turn(np.arange(5, dtype=np.uint32), 3)
    return Plan(Workload("made up", (Conversation((turn,)),)), (LOAD,), IdRange(0, 9), 1.0)
