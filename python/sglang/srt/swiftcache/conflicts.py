"""A flag of SGLang's that cannot stand beside one of SwiftCache's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Conflict(NamedTuple):
    """``present`` tells from the ``ServerArgs`` whether the flag was given."""

    flag: str
    present: Callable[[Any], bool]
    advice: str


# Those that a server with donors and one that lends refuse alike.
DATA_PARALLEL = Conflict(
    "--data-parallel-size > 1",
    lambda a: a.dp_size > 1,
    "start one server per replica instead, behind SGLang's router",
)
DCP = Conflict(
    "--dcp-size > 1",
    lambda a: a.dcp_size > 1,
    "interleaved KV shards are not covered: use --dcp-size 1",
)
DISAGGREGATION = Conflict(
    "--disaggregation-mode",
    lambda a: a.disaggregation_mode != "null",
    "prefill-decode disaggregation is not covered: drop --disaggregation-mode",
)
STREAMING_SESSION = Conflict(
    "--enable-streaming-session",
    lambda a: a.enable_streaming_session,
    "streaming sessions hold KV outside the radix tree: drop the flag",
)
