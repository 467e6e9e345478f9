"""The processes of a cluster: their commands, and which start before which."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from swiftcache_tier.cluster.config import ClusterFile, ServerEntry, split_args
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.log_format import json_wanted
from swiftcache_tier.settings import Settings

SWIFTCACHE = (sys.executable, "-m", "swiftcache_tier")
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Member(NamedTuple):
    """One process to start. `ready`: what it answers on once it serves, a URL or a donor's door."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the environment of `swiftcache up`."""
    ready: str | DonorPaths

    @property
    def line(self) -> str:
        """As one would type it."""
        words = [f"{name}={value}" for name, value in self.env.items()]
        return shlex.join([*words, Path(self.command[0]).name, *self.command[1:]])


def waves(
    cluster: ClusterFile,
    runtime_dir: Path,
    more_args: tuple[str, ...] = (),
    launch: tuple[str, ...] = LAUNCH_SERVER,
) -> list[list[Member]]:
    """The members of a checked cluster, in groups of which each starts when those before it serve.

    Donors come before receivers, which would otherwise find no donor and take host memory. Servers
    on one GPU start one after another: SGLang sizes its pool by what is free at that moment.
    `more_args` are added to those of every server.
    """
    order: dict[tuple[int, int], list[Member]] = {}
    if cluster.donors:
        order[0, 0] = [_donor(cluster, name, runtime_dir) for name in cluster.donors]
    started_on: dict[int, int] = {}
    for name, server in sorted(cluster.servers.items(), key=lambda item: _rank(item[1])):
        turn = 0
        if server.gpu is not None:
            turn = started_on[server.gpu] = started_on.get(server.gpu, -1) + 1
        member = _server(cluster, name, server, runtime_dir, (*launch,), more_args)
        order.setdefault((_rank(server), turn), []).append(member)
    return [order[key] for key in sorted(order)]


def _rank(server: ServerEntry) -> int:
    return 1 if not server.receives else 2 if server.lends else 3


def _donor(cluster: ClusterFile, name: str, runtime_dir: Path) -> Member:
    donor = cluster.donors[name]
    command = [*SWIFTCACHE, "donor", "--device", donor.device, "--size", donor.size]
    command += ["--name", name, "--runtime-dir", str(runtime_dir)]
    return Member(name, tuple(command), cluster.env, donor_paths(runtime_dir, name))


def _server(
    cluster: ClusterFile,
    name: str,
    server: ServerEntry,
    runtime_dir: Path,
    launch: tuple[str, ...],
    more_args: tuple[str, ...],
) -> Member:
    command = [*launch, "--model-path", server.model]
    command += ["--host", cluster.host, "--port", str(server.port)]
    if server.gpu is not None:
        # All GPUs stay visible: a receiver maps memory of others.
        command += ["--base-gpu-id", str(server.gpu)]
    if server.receives:
        command += ["--swiftcache-donors", *(server.donors or [])]
    if server.lends:
        command += ["--swiftcache-donate", str(server.donate or "auto")]
    command += split_args(cluster.args, "args") + split_args(server.args, name) + [*more_args]
    env = {"SWIFTCACHE_RUNTIME_DIR": str(runtime_dir), **cluster.env, **server.env}
    host = _EVERY_ADDRESS.get(cluster.host, cluster.host)
    place = f"[{host}]" if ":" in host else host
    return Member(name, tuple(command), env, f"http://{place}:{server.port}")


def check_settings(members: Iterable[Member]) -> None:
    """Raises SwiftCacheError for a member whose environment has what is no setting, or no value."""
    for member in members:
        environ = environment(member)
        try:
            Settings.from_env(environ)
            json_wanted(environ)
        except SwiftCacheError as error:
            raise SwiftCacheError(f"environment of {member.name!r}: {error}") from None


def environment(member: Member) -> dict[str, str]:
    """Of the member's process; lines are forwarded as they are written, not by the page."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **member.env}
