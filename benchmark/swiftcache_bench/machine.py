"""Where and with what figures were measured: machine, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("sglang", "sglang-swiftcache", "sgl-kernel", "torch", "triton", "flashinfer-python")
QUERY_TIMEOUT_S = 10.0
_GPU_QUERY = "name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max"


def describe_run() -> dict[str, object]:
    """Plain values for JSON. Whatever cannot be found out is "unknown", or not there."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_name(),
            "cpu_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": _gpus(),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), **_versions()},
    }


def _commit() -> str:
    """Of this checkout, with "+changes" when files differ from it."""
    root = Path(__file__).resolve().parents[2]
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return "unknown"
    changed = _output(["git", "-C", str(root), "status", "--porcelain"])
    return commit + ("+changes" if changed else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> list[str]:
    query = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
    return (_output(query) or "").splitlines()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
