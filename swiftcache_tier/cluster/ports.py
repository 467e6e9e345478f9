"""Whether the servers of a cluster could listen where they are told to."""

from __future__ import annotations

import socket

from swiftcache_tier.cluster.config import ClusterFile
from swiftcache_tier.errors import SwiftCacheError


def check_ports(cluster: ClusterFile) -> None:
    """Raises SwiftCacheError for a port that something else listens on, or a host that is not here.

    Otherwise what listens there would answer in the server's stead while it starts.
    """
    for name, server in cluster.servers.items():
        try:
            found = socket.getaddrinfo(
                cluster.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        # UnicodeError: a host such as a..b
        except (OSError, UnicodeError) as error:
            raise SwiftCacheError(
                f"server {name!r} cannot listen on {cluster.host}:{server.port} ({error}): give "
                f"it another port or host, or end what listens there"
            ) from None
