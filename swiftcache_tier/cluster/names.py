"""Whether the donors of a cluster could have the names that they are found by."""

from __future__ import annotations

from pathlib import Path

from swiftcache_tier.cluster.config import ClusterFile
from swiftcache_tier.control.door import check_vacant
from swiftcache_tier.control.runtime_dir import donor_paths, engine_donor_name
from swiftcache_tier.errors import SwiftCacheError


def check_names(cluster: ClusterFile, runtime_dir: Path) -> None:
    """Raises SwiftCacheError for a name that a live donor has already in the runtime directory.

    Receivers would otherwise be started before the donor of the cluster has found out.
    """
    wanted = [(f"donor {name!r}", name, "its key in donors:") for name in cluster.donors]
    wanted += [
        (f"server {name!r}", engine_donor_name(server.port), "its port:")
        for name, server in cluster.servers.items()
        if server.lends and server.port is not None
    ]
    for who, name, chosen_with in wanted:
        try:
            check_vacant(donor_paths(runtime_dir, name), chosen_with)
        except SwiftCacheError as error:
            raise SwiftCacheError(f"{who}: {error}") from None
