"""What a container's environment says of a cluster: its own role, and the models.

`SWIFTCACHE_MASTER_MODEL` is the model of the receiver, `SWIFTCACHE_WORKER_MODELS` those of the
donors, separated by commas. `SWIFTCACHE_ROLE` says which of them are started here: master or
receiver, worker or donor; all of them without it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from swiftcache_tier.cluster.config import ClusterFile, ServerEntry, check_cluster
from swiftcache_tier.errors import SwiftCacheError

ROLE = "SWIFTCACHE_ROLE"
MASTER_MODEL = "SWIFTCACHE_MASTER_MODEL"
WORKER_MODELS = "SWIFTCACHE_WORKER_MODELS"

_IS_MASTER = {"master": True, "receiver": True, "worker": False, "donor": False}


def cluster_of_environment(environ: Mapping[str, str]) -> ClusterFile:
    """One receiver on GPU 0 and donors on the GPUs after it. Raises SwiftCacheError."""
    master, workers = environ.get(MASTER_MODEL), _workers(environ)
    if not master and not workers:
        raise SwiftCacheError(
            f"nothing to start: name a file, or set {MASTER_MODEL} and {WORKER_MODELS}"
        )
    servers = {"master": ServerEntry(model=master, role="receiver", gpu=0)} if master else {}
    first_gpu = len(servers)
    servers |= {
        f"worker-{number}": ServerEntry(model=model, role="donor", gpu=first_gpu + number)
        for number, model in enumerate(workers)
    }
    return apply_environment(check_cluster(ClusterFile(servers=servers)), environ)


def apply_environment(cluster: ClusterFile, environ: Mapping[str, str]) -> ClusterFile:
    """`cluster` with the models that `environ` names, and only the servers of its role.

    Donors of plain memory belong to the worker's role. Raises SwiftCacheError where role or models
    do not fit the cluster.
    """
    receivers = [name for name, server in cluster.servers.items() if server.receives]
    donors = [name for name, server in cluster.servers.items() if server.role == "donor"]
    models: dict[str, str] = {}
    if master := environ.get(MASTER_MODEL):
        if len(receivers) != 1:
            raise SwiftCacheError(
                f"{MASTER_MODEL} is set, but the cluster has {len(receivers)} receivers: it is for "
                f"clusters with one; unset it"
            )
        models[receivers[0]] = master
    if workers := _workers(environ):
        if len(workers) != len(donors):
            raise SwiftCacheError(
                f"{WORKER_MODELS} names {len(workers)} models, but the cluster has {len(donors)} "
                f"donor servers: name as many, separated by commas, or unset it"
            )
        models |= zip(donors, workers, strict=True)
    servers = {
        name: replace(server, model=models.get(name, server.model))
        for name, server in cluster.servers.items()
    }
    return _of_role(replace(cluster, servers=servers), environ.get(ROLE))


def _of_role(cluster: ClusterFile, role: str | None) -> ClusterFile:
    if not role:
        return cluster
    if role not in _IS_MASTER:
        raise SwiftCacheError(f"{ROLE} is {role!r}: expected one of {', '.join(_IS_MASTER)}")
    master = _IS_MASTER[role]
    servers = {name: s for name, s in cluster.servers.items() if s.receives == master}
    donors = {} if master else cluster.donors
    if not servers and not donors:
        raise SwiftCacheError(
            f"{ROLE} is {role!r}, but the cluster has nothing of that role: unset it, or give a "
            f"server that role"
        )
    return replace(cluster, servers=servers, donors=donors)


def _workers(environ: Mapping[str, str]) -> list[str]:
    names = environ.get(WORKER_MODELS, "").split(",")
    return [name.strip() for name in names if name.strip()]
