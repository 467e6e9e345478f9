"""A server that runs already and is measured where it is: several workloads, one start."""

from __future__ import annotations

from typing import Any, NamedTuple

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.server.api import server_info

# Of /server_info: what a server that took another's place would not have in common with it.
_IDENTITY = ("weight_version", "random_seed", "port", "model_path", "max_total_num_tokens")


class AttachedServer:
    """A server started elsewhere, and left running. Only that it stays the same is checked.

    Give it a ``--weight-version`` of its own where several may listen in turn.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self._identity: tuple[Any, ...] | None = None

    def check(self) -> dict[str, Any]:
        """``/server_info``. Raises BenchmarkError when another server answers than at first."""
        info = server_info(self.url)
        identity = tuple(info.get(field) for field in _IDENTITY)
        if self._identity is None:
            self._identity = identity
        if identity != self._identity:
            raise BenchmarkError(
                f"another server answers at {self.url} than at first: keep {self.name!r} running, "
                f"and nothing else on its port"
            )
        return info


class Attachment(NamedTuple):
    """What ``--attach`` names."""

    name: str
    url: str


def parse_attachment(text: str) -> Attachment:
    """``NAME=URL`` of the command line. Raises BenchmarkError."""
    name, _, url = text.partition("=")
    if not name.strip() or not url.startswith(("http://", "https://")):
        raise BenchmarkError(f"attached server {text!r}: expected NAME=http://HOST:PORT")
    return Attachment(name.strip(), url)
