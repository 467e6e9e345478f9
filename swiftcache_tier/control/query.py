"""Ask a donor how it stands, without a session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from swiftcache_tier.control.door import connect_door
from swiftcache_tier.control.messages import (
    FROM_DOOR,
    PROTOCOL,
    DrainRequest,
    Error,
    FromDoor,
    LimitRequest,
    MessageError,
    StatusReply,
    StatusRequest,
    check_protocol,
    decode,
    encode,
)
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import recv_fds, send_fds
from swiftcache_tier.settings import Settings


class Unresponsive(SwiftCacheError):
    """A donor's process is there but does not answer."""


def query_status(paths: DonorPaths, settings: Settings) -> StatusReply:
    """The status of the donor at `paths`, as `ask` does."""
    return ask(paths, StatusRequest(protocol=PROTOCOL), settings)


def ask(
    paths: DonorPaths, request: StatusRequest | LimitRequest | DrainRequest, settings: Settings
) -> StatusReply:
    """What the donor at `paths` answers; blocks for `settings.status_timeout_s` at most.

    Raises NoDonor when nobody listens there, Unresponsive when no answer came in time,
    MessageError when the donor refuses or speaks another version, SwiftCacheError when what
    answers is no donor.
    """
    with connect_door(paths) as connection:
        connection.settimeout(settings.status_timeout_s)
        with named_failures(paths, settings.status_timeout_s):
            with suppress(BrokenPipeError):  # turned away at once; what it says can be read
                send_fds(connection, encode(request), ())
            record = recv_fds(connection, settings.message_bytes_max, 1)
    for descriptor in record.descriptors:
        os.close(descriptor)
    reply = read_door(record.payload, paths, settings)
    if not isinstance(reply, StatusReply):
        raise SwiftCacheError(
            f"the donor at {paths.spec} answered {type(reply).__name__} to "
            f"{type(request).__name__}: restart it in this version of sglang-swiftcache"
        )
    return reply


@contextmanager
def named_failures(paths: DonorPaths, timeout_s: float) -> Iterator[None]:
    """Talk to a donor's door inside: what goes wrong is told with the donor's name.

    Raises Unresponsive for a TimeoutError, after `timeout_s`, and an OSError, and SwiftCacheError
    for one that does not say whom it is about.
    """
    try:
        yield
    except TimeoutError:
        raise Unresponsive(
            f"the donor at {paths.spec} has not answered for {timeout_s:g} s: it is stopped or "
            f"stuck; let it go on (SIGCONT) or end it"
        ) from None
    except OSError as error:
        raise Unresponsive(
            f"the donor at {paths.spec} closed the connection: {error.strerror}"
        ) from error
    except SwiftCacheError as error:
        raise SwiftCacheError(f"the donor at {paths.spec} sent no answer: {error}") from error


def read_door(payload: bytes, paths: DonorPaths, settings: Settings) -> FromDoor:
    """What the donor at `paths` said at its door.

    Raises MessageError for another protocol version, for what is no message, and for an Error,
    whose code and text it takes over; Unresponsive for the end of the connection.
    """
    who = f"the donor at {paths.spec}"
    if not payload:
        raise Unresponsive(f"{who} closed the connection without an answer")
    check_protocol(payload, who)
    try:
        message = decode(FROM_DOOR, payload, settings.message_bytes_max)
    except MessageError as error:
        raise MessageError(error.code, f"{who} sent a {error}") from None
    if isinstance(message, Error):
        raise MessageError(message.code, f"{who} refuses: {message.message}")
    return message
