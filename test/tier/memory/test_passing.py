"""Descriptors over a Unix socket: whole records, bounded, nothing leaked."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from support.raw_memory import no_descriptor_leaks, record_sockets, run_child
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import FDS_PER_RECORD_MAX, Record, recv_fds, send_fds


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = record_sockets()
    with one, other:
        yield one, other


def memfds(count: int) -> list[int]:
    return [os.memfd_create(f"test-{i}") for i in range(count)]


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def files(descriptors: list[int]) -> list[int]:
    return [os.fstat(descriptor).st_ino for descriptor in descriptors]


@pytest.mark.parametrize("count", [0, 1, 2, 7, FDS_PER_RECORD_MAX])
def test_a_record_arrives_whole_and_in_order(
    sockets: tuple[socket.socket, socket.socket], count: int
) -> None:
    one, other = sockets
    with no_descriptor_leaks():
        sent = memfds(count)
        send_fds(one, b"grant 7", sent)
        expected = files(sent)
        close_all(sent)
        record = recv_fds(other, 64, count)
        assert record.payload == b"grant 7"
        assert files(record.descriptors) == expected
        assert not any(os.get_inheritable(descriptor) for descriptor in record.descriptors)
        close_all(record.descriptors)


def test_records_are_kept_apart(sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = sockets
    with no_descriptor_leaks():
        sent = memfds(3)
        send_fds(one, b"first", sent[:1])
        send_fds(one, b"second", [])
        send_fds(one, b"third", sent[1:])
        records = [recv_fds(other, 64, 8) for _ in range(3)]
        assert [record.payload for record in records] == [b"first", b"second", b"third"]
        assert [files(record.descriptors) for record in records] == [
            files(sent[:1]),
            [],
            files(sent[1:]),
        ]
        close_all(sent)
        for record in records:
            close_all(record.descriptors)


@pytest.mark.parametrize(
    ("payload", "sent_count", "payload_bytes_max", "descriptors_max", "reason"),
    [
        (b"x", 5, 64, 2, "more than the 2 descriptors"),
        (b"x", 2, 64, 1, "more than the 1 descriptors"),  # fits by the kernel's rounding
        (b"x", 4, 64, 3, "more than the 3 descriptors"),
        (b"x", 1, 64, 0, "more than the 0 descriptors"),
        (b"x" * 65, 0, 64, 2, "longer than the 64 bytes"),
        (b"x" * 65, 2, 64, 2, "longer than the 64 bytes"),
    ],
)
def test_a_record_over_a_limit_is_dropped_and_the_next_one_arrives(
    sockets: tuple[socket.socket, socket.socket],
    payload: bytes,
    sent_count: int,
    payload_bytes_max: int,
    descriptors_max: int,
    reason: str,
) -> None:
    one, other = sockets
    with no_descriptor_leaks():
        sent = memfds(sent_count)
        send_fds(one, payload, sent)
        close_all(sent)
        send_fds(one, b"next", [])
        with pytest.raises(SwiftCacheError, match=reason) as caught:
            recv_fds(other, payload_bytes_max, descriptors_max)
        assert "\n" not in str(caught.value)
        assert recv_fds(other, payload_bytes_max, descriptors_max) == Record(b"next", [])


def test_no_room_for_descriptors_is_an_error_and_not_a_short_list() -> None:
    one, other = record_sockets()
    with one, other, no_descriptor_leaks():
        sent = memfds(20)
        send_fds(one, b"grant", sent)
        close_all(sent)
        status, output = run_child(
            "import os, resource, socket, sys\n"
            "from swiftcache_tier.errors import SwiftCacheError\n"
            "from swiftcache_tier.extents import recv_fds\n"
            "peer = socket.socket(fileno=int(sys.argv[1]))\n"
            "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))\n"
            "before = os.listdir('/proc/self/fd')\n"
            "try: recv_fds(peer, 64, 20)\n"
            "except SwiftCacheError as error: print(error)\n"
            "assert os.listdir('/proc/self/fd') == before\n",
            other,
        )
    assert status == 0
    assert output.count("\n") == 1
    assert "ulimit -n" in output


def test_end_of_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = sockets
    send_fds(one, b"last", [])
    one.close()
    assert recv_fds(other, 64, 2) == Record(b"last", [])
    assert recv_fds(other, 64, 2) == Record(b"", [])


def test_nothing_to_receive_and_no_room_to_send_do_not_block(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    one, other = sockets
    one.setblocking(False)
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_fds(other, 64, 2)
    sent = 0
    try:
        while True:
            send_fds(one, b"x" * 1000, [])
            sent += 1
    except BlockingIOError:
        assert sent > 0
    for _ in range(sent):
        assert recv_fds(other, 1000, 0).payload == b"x" * 1000
    with pytest.raises(BlockingIOError):
        recv_fds(other, 64, 2)


def test_what_cannot_be_a_record_is_refused(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    one, _ = sockets
    with pytest.raises(ValueError, match="payload"):
        send_fds(one, b"", [])
    with pytest.raises(ValueError, match=f"at most {FDS_PER_RECORD_MAX}"):
        send_fds(one, b"x", [0] * (FDS_PER_RECORD_MAX + 1))


def test_a_socket_that_would_join_records_is_refused() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        with pytest.raises(ValueError, match="SOCK_SEQPACKET"):
            send_fds(one, b"x", [])
        with pytest.raises(ValueError, match="SOCK_SEQPACKET"):
            recv_fds(other, 64, 1)
