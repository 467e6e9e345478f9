"""The file that describes a cluster, checked as far as it can be before anything is started."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from swiftcache_tier.control.messages import NAME_PATTERN
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import parse_size
from swiftcache_tier.spec import parse_specs

Role = Literal["receiver", "donor", "both", "none"]

FIRST_PORT = 8000

_Port = Annotated[int, Meta(ge=1, le=65535)]
_Gpu = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(gt=0)]
_Name = Annotated[str, Meta(pattern=NAME_PATTERN)]


class ServerEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One SGLang server.

    `gpu` is the first that it uses; None on the CPU. `donors` are the SPECs of a receiver (default:
    auto), `donate` what a donor lends of its own KV memory (default: auto). `args` are more server
    flags, as on a command line. `port` defaults to 8000 and on, in the order of the file.
    """

    model: str
    role: Role = "none"
    gpu: _Gpu | None = None
    port: _Port | None = None
    donors: list[str] | None = None
    donate: str | float | None = None
    args: str = ""
    env: dict[str, str] = {}

    @property
    def receives(self) -> bool:
        return self.role in ("receiver", "both")

    @property
    def lends(self) -> bool:
        return self.role in ("donor", "both")


class DonorEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One donor of plain memory: `device` is "host" or "cuda:N", `size` as in 40GiB."""

    device: str
    size: str


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A cluster. `args` and `env` are those of every server, before the server's own.

    `start_timeout_s`: what each group of processes that start together is given to be ready;
    `stop_timeout_s`: what they are given to end by themselves.
    """

    servers: dict[_Name, ServerEntry] = {}
    donors: dict[_Name, DonorEntry] = {}
    host: str = "127.0.0.1"
    args: str = ""
    env: dict[str, str] = {}
    start_timeout_s: _Seconds = 900.0
    stop_timeout_s: _Seconds = 30.0


def read_cluster_file(path: Path) -> ClusterFile:
    """The cluster that a YAML or JSON file describes; `check_cluster` has passed.

    A model that begins with ./ or ../ lies beside the file. Raises SwiftCacheError naming the entry
    that is wrong.
    """
    try:
        cluster = msgspec.yaml.decode(path.read_bytes(), type=ClusterFile)
    except OSError as error:
        raise SwiftCacheError(
            f"cannot read {path} ({error.strerror}): name a YAML file that describes a cluster"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SwiftCacheError(f"{path}: {' '.join(str(error).split())}") from None
    folder = path.absolute().parent
    servers = {
        name: replace(server, model=_beside(folder, server.model))
        for name, server in cluster.servers.items()
    }
    try:
        return check_cluster(replace(cluster, servers=servers))
    except SwiftCacheError as error:
        raise SwiftCacheError(f"{path}: {error}") from None


def check_cluster(cluster: ClusterFile) -> ClusterFile:
    """`cluster` with a port for each server. Raises SwiftCacheError for what cannot be started."""
    if not cluster.servers and not cluster.donors:
        raise SwiftCacheError("no servers and no donors: describe one at least under servers:")
    both = cluster.servers.keys() & cluster.donors.keys()
    if both:
        raise SwiftCacheError(f"{min(both)!r} names a server and a donor: give each its own name")
    for name, donor in cluster.donors.items():
        _check_donor(name, donor)
    split_args(cluster.args, "args")
    taken: dict[int, str] = {}
    servers: dict[str, ServerEntry] = {}
    for name, server in cluster.servers.items():
        _check_server(name, server)
        port = FIRST_PORT + len(servers) if server.port is None else server.port
        if port in taken:
            raise SwiftCacheError(
                f"servers {taken[port]!r} and {name!r} both have port {port}: give each its own"
            )
        taken[port] = name
        servers[name] = replace(server, port=port)
    return replace(cluster, servers=servers)


def split_args(text: str, where: str) -> list[str]:
    """Server flags as a shell splits them. Raises SwiftCacheError that names `where`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SwiftCacheError(f"{where}: cannot split {text!r} into flags ({error})") from None


def _check_donor(name: str, donor: DonorEntry) -> None:
    try:
        if not re.fullmatch(r"host|cuda:[0-9]+", donor.device):
            raise SwiftCacheError(f"device {donor.device!r} is not known: write host or cuda:1")
        if not parse_size(donor.size):
            raise SwiftCacheError("size 0: give it some memory, as in 40GiB")
    except SwiftCacheError as error:
        raise SwiftCacheError(f"donor {name!r}: {error}") from None


def _check_server(name: str, server: ServerEntry) -> None:
    where = f"server {name!r}"
    if not server.model:
        raise SwiftCacheError(f"{where} has no model: give a folder or a hub name")
    if server.model.startswith("/") and not Path(server.model).is_dir():
        raise SwiftCacheError(f"{where}: there is no folder {server.model}: correct its model")
    if server.donors is not None and not server.receives:
        raise SwiftCacheError(
            f"{where} has donors, but its role is {server.role!r}: make it receiver or both"
        )
    if server.donate is not None and not server.lends:
        raise SwiftCacheError(
            f"{where} has donate, but its role is {server.role!r}: make it donor or both"
        )
    split_args(server.args, where)
    try:
        parse_specs(server.donors)
        _check_share(server.donate)
    except SwiftCacheError as error:
        raise SwiftCacheError(f"{where}: {error}") from None


def _check_share(donate: str | float | None) -> None:
    if donate is None or donate == "auto":
        return
    try:
        share = float(donate)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise SwiftCacheError(
            f"donate is {donate!r}: expected auto or a part of its KV memory, such as 0.5"
        )


def _beside(folder: Path, path: str) -> str:
    return str((folder / path).resolve()) if path.startswith(("./", "../")) else path
