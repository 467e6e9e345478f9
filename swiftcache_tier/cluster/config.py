"""The file that describes a cluster, checked as far as it can be before anything is started."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from swiftcache_tier.cluster.entries import Entry, load_yaml, read_entry
from swiftcache_tier.control.messages import NAME_FORM, NAME_PATTERN
from swiftcache_tier.control.runtime_dir import engine_donor_name
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import parse_size
from swiftcache_tier.spec import parse_specs

Role = Literal["receiver", "donor", "both", "none"]

FIRST_PORT = 8000

# Where a server is asked whether it serves, and where it meets donors.
_NOT_IN_ARGS = {
    "--host": "give the cluster a host: instead",
    "--port": "give the server a port: instead",
    "--swiftcache-runtime-dir": "give `swiftcache up` the --runtime-dir of all instead",
}
_RUNTIME_DIR = "SWIFTCACHE_RUNTIME_DIR"

# What each value is expected to be, in words: errors say it.
_Model = Annotated[str, Meta(min_length=1, description="a folder or a hub name")]
_Role = Annotated[Role, Meta(description="receiver, donor, both or none")]
_Gpu = Annotated[
    Annotated[int, Meta(ge=0)] | None, Meta(description="the number of a GPU, such as 0")
]
_Port = Annotated[
    Annotated[int, Meta(ge=1, le=65535)] | None, Meta(description="a port, 1 to 65535")
]
_Specs = Annotated[
    list[str] | None, Meta(description="a list of SPECs, such as [auto] or ['host=8GiB']")
]
_Share = Annotated[
    str | float | None, Meta(description="auto or a part of its KV memory, such as 0.5")
]
_Flags = Annotated[str, Meta(description="flags in one text, such as --page-size 16")]
_Env = Annotated[
    dict[str, str], Meta(description='variables with texts, such as {OMP_NUM_THREADS: "8"}')
]
_Device = Annotated[
    str, Meta(pattern=r"\A(host|cuda:[0-9]+)\Z", description="host or a GPU, such as cuda:1")
]
_Size = Annotated[str, Meta(description="a size with its unit, such as 40GiB")]
_Host = Annotated[str, Meta(description="an address to listen on, such as 127.0.0.1")]
_Seconds = Annotated[
    float, Meta(gt=0, le=sys.float_info.max, description="seconds, more than 0 and finite")
]


class ServerEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One SGLang server.

    `gpu` is the first that it uses; None on the CPU. `donors` are the SPECs of a receiver (default:
    auto), `donate` what a donor lends of its own KV memory (default: auto). `args` are more server
    flags, as on a command line. `port` defaults to 8000 and on, in the order of the file.
    """

    model: _Model
    role: _Role = "none"
    gpu: _Gpu = None
    port: _Port = None
    donors: _Specs = None
    donate: _Share = None
    args: _Flags = ""
    env: _Env = {}

    @property
    def receives(self) -> bool:
        return self.role in ("receiver", "both")

    @property
    def lends(self) -> bool:
        return self.role in ("donor", "both")


class DonorEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One donor of plain memory: `device` is "host" or "cuda:N", `size` as in 40GiB."""

    device: _Device
    size: _Size


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A cluster. `args` and `env` are those of every server, before the server's own.

    `start_timeout_s`: what each group of processes that start together is given to be ready;
    `stop_timeout_s`: what they are given to end by themselves.
    """

    servers: Annotated[
        dict[str, ServerEntry],
        Meta(description="a name for each server, as in chat: {model: ./folder}"),
    ] = {}
    donors: Annotated[
        dict[str, DonorEntry],
        Meta(description="a name for each donor, as in attic: {device: host, size: 8GiB}"),
    ] = {}
    host: _Host = "127.0.0.1"
    args: _Flags = ""
    env: _Env = {}
    start_timeout_s: _Seconds = 900.0
    stop_timeout_s: _Seconds = 30.0


def read_cluster_file(path: Path) -> ClusterFile:
    """The cluster that a YAML or JSON file describes; `check_cluster` has passed.

    A model that begins with ./ or ../ lies beside the file. Raises SwiftCacheError naming the entry
    that is wrong.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SwiftCacheError(
            f"cannot read {path} ({error.strerror}): name a YAML file that describes a cluster"
        ) from None
    folder = path.absolute().parent
    try:
        cluster = _cluster(load_yaml(text))
        servers = {
            name: replace(server, model=_beside(folder, server.model))
            for name, server in cluster.servers.items()
        }
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
    _check_args(split_args(cluster.args, "args"), "args")
    _check_env(cluster.env, "env")
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
        if server.lends and engine_donor_name(port) in cluster.donors:
            raise SwiftCacheError(
                f"donor {engine_donor_name(port)!r} has the name under which server {name!r} "
                f"lends, by its port: give the donor another"
            )
        servers[name] = replace(server, port=port)
    return replace(cluster, servers=servers)


def add_server_args(cluster: ClusterFile, text: str) -> tuple[ClusterFile, tuple[str, ...]]:
    """`cluster` with the host that `--server-args` names, if it does, and the other flags there.

    Raises SwiftCacheError for flags that the cluster sets itself.
    """
    where = "--server-args"
    words = iter(split_args(text, where))
    flags = []
    for word in words:
        flag, _, value = word.partition("=")
        if flag != "--host":
            flags.append(word)
        elif host := value or next(words, ""):
            cluster = replace(cluster, host=host)
        else:
            raise SwiftCacheError(f"{where}: expected an address after --host, such as 0.0.0.0")
    _check_args(flags, where)
    return cluster, tuple(flags)


def split_args(text: str, where: str) -> list[str]:
    """Server flags as a shell splits them. Raises SwiftCacheError that names `where`."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SwiftCacheError(
            f"{where}: cannot split {text!r} into flags ({error}): quote it as in a shell"
        ) from None


def _cluster(said: Any) -> ClusterFile:
    if isinstance(said, dict):
        servers = _named(ServerEntry, "server", said.get("servers", {}))
        donors = _named(DonorEntry, "donor", said.get("donors", {}))
        said = {**said, "servers": servers, "donors": donors}
    return read_entry(ClusterFile, {} if said is None else said)  # None: nothing but comments


def _named(kind: type[Entry], one: str, said: Any) -> Any:
    """Entries by name; what has no names is left as it is, for its own field to refuse."""
    if not isinstance(said, dict):
        return said
    for name in said:
        if not isinstance(name, str) or not re.search(NAME_PATTERN, name):
            raise SwiftCacheError(f"{one} name {name!r} cannot be used: expected {NAME_FORM}")
    return {name: read_entry(kind, value, f"{one} {name!r}") for name, value in said.items()}


def _check_donor(name: str, donor: DonorEntry) -> None:
    try:
        if not parse_size(donor.size):
            raise SwiftCacheError("size 0: give it some memory, as in 40GiB")
    except SwiftCacheError as error:
        raise SwiftCacheError(f"donor {name!r}: {error}") from None


def _check_server(name: str, server: ServerEntry) -> None:
    where = f"server {name!r}"
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
    _check_args(split_args(server.args, f"{where}: args"), f"{where}: args")
    _check_env(server.env, f"{where}: env")
    try:
        parse_specs(server.donors)
        _check_share(server.donate)
    except SwiftCacheError as error:
        raise SwiftCacheError(f"{where}: {error}") from None


def _check_args(words: list[str], where: str) -> None:
    for flag in (word.partition("=")[0] for word in words):
        for owned, instead in _NOT_IN_ARGS.items():
            # argparse takes any beginning of a flag that no other flag has
            if len(flag) > len("--") and owned.startswith(flag):
                raise SwiftCacheError(f"{where}: {flag} cannot be among them: {instead}")


def _check_env(env: dict[str, str], where: str) -> None:
    if _RUNTIME_DIR in env:
        raise SwiftCacheError(
            f"{where}: {_RUNTIME_DIR} is that of all servers and donors, or they do not meet: set "
            f"it for `swiftcache up` instead, or give that --runtime-dir"
        )


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
