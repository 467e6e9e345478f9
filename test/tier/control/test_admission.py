"""Who may speak with a donor, and what it answers to those who speak nonsense."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from swiftcache_tier.control import query
from swiftcache_tier.control.credentials import Credentials
from swiftcache_tier.control.door import connect_door
from swiftcache_tier.control.messages import (
    FROM_DOOR,
    PROTOCOL,
    TO_RECEIVER,
    Bye,
    Error,
    ErrorCode,
    Farewell,
    Hello,
    LimitRequest,
    MessageError,
    Ping,
    Pong,
    Released,
    StatusReply,
    StatusRequest,
    Welcome,
    encode,
)
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.records import RecordChannel
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.donor import reception
from swiftcache_tier.donor.reception import Reception
from swiftcache_tier.extents import recv_fds, send_fds
from swiftcache_tier.receiver import greeting
from swiftcache_tier.receiver.greeting import greet
from swiftcache_tier.receiver.reach import Reach

DEADLINE_S = 60.0


@contextmanager
def at_door(donor: Any) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(donor.paths.door))
        yield connection


def say(connection: socket.socket, data: bytes) -> Any:
    """The donor's answer; None if it closes the connection."""
    send_fds(connection, data, ())
    record = recv_fds(connection, 1 << 16, 0)
    return FROM_DOOR.decode(record.payload) if record.payload else None


def is_closed(connection: socket.socket) -> bool:
    return recv_fds(connection, 1 << 16, 0).payload == b""


class RawControl:
    """A control socket of which every byte is the test's."""

    def __init__(self, donor: Any) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.rcvtimeo = self.socket.sndtimeo = int(DEADLINE_S * 1000)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{donor.paths.control}")

    def say(self, *frames: bytes) -> Any:
        self.socket.send_multipart(frames)
        return TO_RECEIVER.decode(self.socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def donor(lasting_donor: Any) -> Any:
    return lasting_donor


@pytest.fixture
def control(donor: Any) -> Iterator[RawControl]:
    with closing(RawControl(donor)) as control:
        yield control


@pytest.fixture(scope="module")
def user(lasting_user: Any) -> Any:
    """Somebody else who uses the donor meanwhile."""
    lasting_user.ids = lasting_user.take_all()
    lasting_user.write(lasting_user.ids, 1)
    return lasting_user


def assert_goes_on(donor: Any, user: Any) -> None:
    """The donor runs, and its other receiver has what it had."""
    assert donor.process.poll() is None
    user.tier.poll()
    assert user.holds(user.ids, 1)
    assert donor.extents("lent") == 2


GARBAGE = {
    "empty map": b"\x80",
    "no msgpack": b"\xc1\xff\x00",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nested": b"\x91" * 5000,
    "unknown type": msgspec.msgpack.encode({"type": "Steal", "token": "x"}),
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_answered_with_an_error(
    donor: Any, user: Any, control: RawControl, data: bytes
) -> None:
    for answer in (control.say(data), control.say(data)):
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.MALFORMED
    with at_door(donor) as connection:
        answer = say(connection, data)
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.MALFORMED
        assert is_closed(connection)
    assert "malformed" in donor.log()
    assert_goes_on(donor, user)


def test_a_flood_of_garbage_is_logged_in_few_lines(start_donor: Any, settings: Any) -> None:
    donor = start_donor("a", "1MiB")
    with closing(RawControl(donor)) as control:
        for _ in range(2000):
            assert isinstance(control.say(b"\x80"), Error)
        lines = donor.log().count("malformed")
        assert 1 <= lines < 200
        # The next line says how many were kept back.
        while "more like it" not in donor.log():
            control.say(b"\x80")


def test_several_frames_are_answered_with_an_error(
    donor: Any, user: Any, control: RawControl
) -> None:
    ping = encode(Ping("0" * 32, 1))
    for frames in ((ping, ping), (b"",), (b"", b"", b"")):
        answer = control.say(*frames)
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.MALFORMED
    assert_goes_on(donor, user)


def test_a_long_message_is_answered_with_an_error(
    donor: Any, user: Any, control: RawControl, settings: Any
) -> None:
    long = encode(Ping("0" * (settings.message_bytes_max + 1), 1))
    answer = control.say(long)
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.TOO_LARGE
    assert str(settings.message_bytes_max) in answer.message
    with at_door(donor) as connection:
        answer = say(connection, long)
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.TOO_LARGE
    assert_goes_on(donor, user)


def test_a_huge_message_does_not_reach_the_donor(donor: Any, user: Any, settings: Any) -> None:
    process = psutil.Process(donor.process.pid)
    with closing(RawControl(donor)) as huge:
        before_bytes = process.memory_info().rss
        huge.socket.send(b"\x00" * (64 << 20))
        # Its connection is closed and opened again, whereupon it may speak as before.
        assert isinstance(huge.say(b"\x80"), Error)
        assert process.memory_info().rss - before_bytes < 32 << 20
    assert_goes_on(donor, user)


@pytest.mark.parametrize("token", ["", "0" * 32, "../../etc/passwd"])
def test_a_token_of_no_session_is_answered_with_an_error(
    donor: Any, user: Any, control: RawControl, token: str
) -> None:
    for message in (Ping(token, 2), Released(token, 1, [0, 1])):
        answer = control.say(encode(message))
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.NO_SESSION
    assert_goes_on(donor, user)


def test_leaving_a_session_that_has_ended_is_no_error(
    donor: Any, user: Any, control: RawControl
) -> None:
    """A receiver repeats Bye until it is answered, and may be late with it."""
    assert control.say(encode(Bye("0" * 32))) == Farewell()
    assert "Bye" not in donor.log()
    assert_goes_on(donor, user)


def test_a_session_cannot_give_away_what_another_holds(
    donor: Any, user: Any, control: RawControl
) -> None:
    with at_door(donor) as connection:
        welcome = say(connection, encode(Hello(PROTOCOL, "thief")))
        assert isinstance(welcome, Welcome)
        for grant in range(1, 5):
            control.socket.send(encode(Released(welcome.token, grant, [0, 1])))
        answer = control.say(encode(Ping(welcome.token, 0)))
        assert answer == Pong(target=0)
        assert_goes_on(donor, user)
        assert control.say(encode(Bye(welcome.token))) == Farewell()
        assert is_closed(connection)


@pytest.mark.parametrize("kind", ["Hello", "StatusRequest", "SomethingNew"])
def test_another_version_is_told_both_numbers(donor: Any, user: Any, kind: str) -> None:
    message = {"type": kind, "protocol": PROTOCOL + 1, "receiver": "new", "colour": "blue"}
    with at_door(donor) as connection:
        answer = say(connection, msgspec.msgpack.encode(message))
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.PROTOCOL
        assert f"version {PROTOCOL + 1}" in answer.message
        assert f"version {PROTOCOL}:" in answer.message
    assert_goes_on(donor, user)


def test_a_receiver_refuses_a_donor_of_another_version(
    runtime_dir: Any, start_tier: Any, one_line: Any
) -> None:
    path = runtime_dir / "new.fds"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as door:
        door.bind(str(path))
        door.listen()

        def serve() -> None:
            connection, _ = door.accept()
            with connection:
                connection.recv(1 << 16)
                body = {"type": "Welcome", "protocol": PROTOCOL + 1, "colour": "blue"}
                connection.send(msgspec.msgpack.encode(body))

        with ThreadPoolExecutor(1) as pool:
            served = pool.submit(serve)
            line = one_line(lambda: start_tier(f"ipc://{path}"))
            served.result()
    path.unlink()
    assert f"version {PROTOCOL + 1}" in line
    assert f"version {PROTOCOL}:" in line


def test_words_at_the_door_of_a_session_end_its_connection(donor: Any, user: Any) -> None:
    with at_door(donor) as connection:
        assert isinstance(say(connection, encode(Hello(PROTOCOL, "chatty"))), Welcome)
        send_fds(connection, b"and another thing", ())
        assert is_closed(connection)
    assert_goes_on(donor, user)


def test_descriptors_that_are_sent_to_a_donor_are_not_kept(
    donor: Any, user: Any, wait_for: Any
) -> None:
    process = psutil.Process(donor.process.pid)
    before = process.num_fds()
    with open(os.devnull) as null:
        for _ in range(5):
            with at_door(donor) as connection:
                send_fds(connection, encode(StatusRequest(PROTOCOL)), [null.fileno()] * 9)
                answer = FROM_DOOR.decode(recv_fds(connection, 1 << 16, 0).payload)
                assert isinstance(answer, Error)
    wait_for(lambda: process.num_fds() <= before, "all are closed")
    assert_goes_on(donor, user)


def test_who_says_nothing_is_shown_out(start_donor: Any, settings: Any) -> None:
    donor = start_donor("a", settings=replace(settings, handshake_timeout_s=0.2))
    with at_door(donor) as connection:
        assert is_closed(connection)
    assert "said nothing for 0.2 s" in donor.log()


def test_there_is_room_for_so_many_only(start_donor: Any, settings: Any) -> None:
    donor = start_donor("a", settings=replace(settings, sessions_max=2))
    with at_door(donor) as one, at_door(donor) as two:
        assert isinstance(say(one, encode(Hello(PROTOCOL, "one"))), Welcome)
        assert isinstance(say(two, encode(Hello(PROTOCOL, "two"))), Welcome)
        with at_door(donor) as three:
            answer = say(three, encode(Hello(PROTOCOL, "three")))
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.FULL


def test_there_is_room_for_so_many_of_one_process(start_donor: Any, settings: Any) -> None:
    donor = start_donor("a", settings=replace(settings, sessions_per_process_max=1))
    with at_door(donor) as one:
        assert isinstance(say(one, encode(Hello(PROTOCOL, "one"))), Welcome)
        with at_door(donor) as two:
            answer = say(two, encode(Hello(PROTOCOL, "two")))
        assert isinstance(answer, Error)
        assert answer.code == ErrorCode.FULL
        assert f"process {os.getpid()} has 1 sessions" in answer.message
    with at_door(donor), at_door(donor) as second:
        assert is_closed(second), "one of each process is heard out at a time"


def test_so_many_receivers_may_have_limits_of_their_own(start_donor: Any) -> None:
    """All of them must fit into an answer."""
    donor = start_donor("a", "1MiB")
    for number in range(65):
        with at_door(donor) as connection:
            request = LimitRequest(PROTOCOL, bytes=0, receiver=f"{number:0200}")
            answer = say(connection, encode(request))
    assert isinstance(answer, Error)
    assert answer.code == ErrorCode.FULL
    assert len(donor.status().receiver_limit_bytes) == 64


def test_connections_that_wait_are_limited(start_donor: Any, settings: Any, wait_for: Any) -> None:
    donor = start_donor("a", settings=replace(settings, sessions_max=2))
    with at_door(donor), at_door(donor), at_door(donor) as third:
        assert is_closed(third)

    def is_heard() -> bool:
        with at_door(donor) as connection, suppress(ConnectionError):
            return isinstance(say(connection, encode(StatusRequest(PROTOCOL))), StatusReply)
        return False

    wait_for(is_heard, "there is room again")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

ASK_AS_NOBODY = """
import os, pwd, sys
from pathlib import Path
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths_at
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings
paths, settings = donor_paths_at(Path(sys.argv[1])), Settings()
nobody = pwd.getpwnam("nobody")
os.setgroups([])
os.setgid(nobody.pw_gid)
os.setuid(nobody.pw_uid)
try:
    print("let in:", query_status(paths, settings).name)
except SwiftCacheError as error:
    print(error)
"""


def ask_as_nobody(donor: Any, child_env: Any, settings: Any) -> str:
    """What user `nobody` hears who asks for the donor's status."""
    # Its folders let nobody in, as they should; here the donor itself is to decide.
    folder = donor.paths.door.parent
    folder.parent.chmod(0o711)
    folder.chmod(0o711)
    for path in donor.paths:
        path.chmod(0o666)
    done = subprocess.run(
        [sys.executable, "-c", ASK_AS_NOBODY, str(donor.paths.door.with_suffix(""))],
        env=child_env(settings),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    return done.stdout


@as_root
def test_another_user_is_refused(start_donor: Any, child_env: Any, settings: Any) -> None:
    donor = start_donor("a", "2MiB")
    answer = ask_as_nobody(donor, child_env, settings)
    assert "user nobody may not use this donor" in answer
    assert "--allow-user nobody" in answer
    assert donor.status().state == "serving"


@as_root
def test_another_user_that_is_allowed_is_let_in(
    start_donor: Any, child_env: Any, settings: Any
) -> None:
    donor = start_donor("a", "2MiB", "--allow-user", "nobody")
    assert "chmod 711" in donor.log()
    assert all(path.stat().st_mode & 0o777 == 0o666 for path in donor.paths)
    assert ask_as_nobody(donor, child_env, settings) == "let in: a\n"


def test_strangers_keep_nobody_out(
    runtime_dir: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is refused at once, silent or not, and the one place at the door stays free."""
    stranger, friend = 4242, os.geteuid()
    comers = iter([stranger, stranger, friend])
    monkeypatch.setattr(
        reception, "credentials_of", lambda _: Credentials(os.getpid(), next(comers))
    )
    paths = donor_paths(runtime_dir, "a")
    narrow = replace(settings, sessions_max=1, handshake_timeout_s=2 * DEADLINE_S)

    def answer(message: Any, _: Any) -> StatusReply:
        raise MessageError(ErrorCode.FULL, f"{type(message).__name__} was heard")

    async def hear(channel: RecordChannel) -> Any:
        return FROM_DOOR.decode((await channel.receive()).payload)

    async def come_in_turn(door: socket.socket, channels: list[RecordChannel]) -> None:
        request = encode(StatusRequest(PROTOCOL))
        await channels[1].send(request)
        at_work = Reception(door, frozenset({friend}), narrow, answer, lambda *_: None)
        serving = asyncio.create_task(at_work.run())
        async with asyncio.timeout(DEADLINE_S):
            for channel in channels[:2]:
                refusal = await hear(channel)
                assert refusal.code == ErrorCode.NOT_ALLOWED
                assert "user 4242 may not use this donor" in refusal.message
                assert "--allow-user 4242" in refusal.message
                assert (await channel.receive()).payload == b"", "it is shown out"
            await channels[2].send(request)
            assert (await hear(channels[2])).message == "StatusRequest was heard"
        serving.cancel()

    with ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        door.bind(str(paths.door))
        stack.callback(paths.door.unlink)
        door.setblocking(False)
        door.listen()
        channels = [RecordChannel(connect_door(paths), 1 << 16, 0) for _ in range(3)]
        for channel in channels:
            stack.callback(channel.close)
        asyncio.run(come_in_turn(door, channels))


@pytest.mark.parametrize("module", [query, greeting], ids=["query", "greeting"])
def test_who_is_refused_before_it_speaks_hears_why(
    module: Any, runtime_dir: Any, settings: Any, one_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.shutdown(socket.SHUT_RD)
        theirs.send(encode(Error(code=ErrorCode.NOT_ALLOWED, message="not for user x")))
    ours.setblocking(False)
    monkeypatch.setattr(module, "connect_door", lambda _: ours)
    paths = donor_paths(runtime_dir, "a")
    calls = {
        query: lambda: query_status(paths, settings),
        greeting: lambda: asyncio.run(greet(paths, "me", True, Reach("cpu"), settings)),
    }
    assert "refuses: not for user x" in one_line(calls[module])


SAY_AS_NOBODY = """
import os, pwd, sys, zmq
context = zmq.Context()
nobody = pwd.getpwnam("nobody")
os.setgroups([])
os.setgid(nobody.pw_gid)
os.setuid(nobody.pw_uid)
socket = context.socket(zmq.DEALER)
socket.linger = 0
socket.connect(f"ipc://{sys.argv[1]}")
socket.send(b"x")
print("answered" if socket.poll(int(sys.argv[2])) else "nothing")
context.destroy(linger=0)
"""


@as_root
def test_another_user_is_not_heard_on_the_control_socket(
    start_donor: Any, child_env: Any, settings: Any
) -> None:
    """Also where its mode lets everybody connect, because one more user is allowed."""
    for flags, patience_ms, expected in (
        ((), 1000, "nothing"),
        (("--allow-user", "nobody"), 60_000, "answered"),
    ):
        donor = start_donor(f"a{len(flags)}", "2MiB", *flags)
        for folder in (donor.paths.control.parent, donor.paths.control.parent.parent):
            folder.chmod(0o711)
        donor.paths.control.chmod(0o666)
        done = subprocess.run(
            [sys.executable, "-c", SAY_AS_NOBODY, str(donor.paths.control), str(patience_ms)],
            env=child_env(settings),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        assert done.stdout.strip() == expected
        assert ("malformed" in donor.log()) is (expected == "answered")


def test_sockets_are_private(donor: Any) -> None:
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in donor.paths)


@as_root
def test_memory_is_not_taken_from_another_user_unless_it_is_named(
    runtime_dir: Any, settings: Any, one_line: Any
) -> None:
    paths = donor_paths(runtime_dir, "theirs")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as door:
        door.bind(str(paths.door))
        # The kernel notes who listens.
        os.seteuid(pwd.getpwnam("nobody").pw_uid)
        try:
            door.listen()
        finally:
            os.seteuid(0)
        line = one_line(lambda: asyncio.run(greet(paths, "me", False, Reach("cpu"), settings)))
        assert "runs as user nobody" in line
        assert "ipc://" in line
        hasty = replace(settings, handshake_timeout_s=0.1)
        line = one_line(lambda: asyncio.run(greet(paths, "me", True, Reach("cpu"), hasty)))
        assert "has not answered" in line
    paths.door.unlink()
