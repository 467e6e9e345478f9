"""A receiver presents itself at a donor's door."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import NamedTuple

from swiftcache_tier.control.credentials import Peer, peer_of, user_name
from swiftcache_tier.control.door import connect_door
from swiftcache_tier.control.messages import (
    PROTOCOL,
    ErrorCode,
    Hello,
    MessageError,
    Welcome,
    encode,
)
from swiftcache_tier.control.query import named_failures, read_door
from swiftcache_tier.control.records import RecordChannel
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import FDS_PER_RECORD_MAX
from swiftcache_tier.receiver.reach import Reach
from swiftcache_tier.settings import Settings
from swiftcache_tier.topology import LinkReport


class Greeting(NamedTuple):
    """A session that a donor has opened for this process."""

    paths: DonorPaths
    welcome: Welcome
    peer: Peer
    channel: RecordChannel
    link: LinkReport

    def close(self) -> None:
        """End the connection."""
        self.channel.close()
        os.close(self.peer.pidfd)


async def greet(
    paths: DonorPaths, receiver_name: str, any_user: bool, reach: Reach, settings: Settings
) -> Greeting:
    """Open a session with the donor at `paths`; `any_user` trusts whoever runs it.

    Raises NoDonor, Unresponsive, MessageError for what the donor refuses, and SwiftCacheError for
    what this process refuses.
    """
    connection = connect_door(paths)
    channel = RecordChannel(connection, settings.message_bytes_max, FDS_PER_RECORD_MAX)
    peer: Peer | None = None
    try:
        peer = peer_of(connection)
        if not any_user and peer.uid not in (os.geteuid(), 0):
            raise SwiftCacheError(
                f"the donor at {paths.spec} runs as user {user_name(peer.uid)}: memory is taken "
                f"from this user's own donors; name it in an ipc:// SPEC if you trust it"
            )
        welcome = await _hello(channel, paths, receiver_name, settings)
        try:
            link = reach.link_to(welcome.device, welcome.device_uuid)
        except SwiftCacheError as error:
            raise SwiftCacheError(f"the donor at {paths.spec} cannot be used: {error}") from error
    except BaseException:
        channel.close()
        if peer is not None:
            os.close(peer.pidfd)
        raise
    return Greeting(paths, welcome, peer, channel, link)


async def _hello(
    channel: RecordChannel, paths: DonorPaths, receiver_name: str, settings: Settings
) -> Welcome:
    with named_failures(paths, settings.handshake_timeout_s):
        async with asyncio.timeout(settings.handshake_timeout_s):
            with suppress(BrokenPipeError):  # turned away at once; what it says can be read
                await channel.send(encode(Hello(protocol=PROTOCOL, receiver=receiver_name)))
            record = await channel.receive()
    for descriptor in record.descriptors:
        os.close(descriptor)
    reply = read_door(record.payload, paths, settings)
    if not isinstance(reply, Welcome):
        raise MessageError(
            ErrorCode.MALFORMED,
            f"the donor at {paths.spec} answered {type(reply).__name__} to Hello: restart it in "
            f"this version of sglang-swiftcache",
        )
    return reply
