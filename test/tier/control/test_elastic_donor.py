"""A donor inside an engine's process, with real receivers in processes of their own."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.raw_memory import run_child
from swiftcache_tier.cli.exporter import DonorCollector
from swiftcache_tier.control.credentials import Peer
from swiftcache_tier.control.door import connect_door, leave_door, take_door
from swiftcache_tier.control.messages import (
    PROTOCOL,
    DrainRequest,
    Hello,
    LimitRequest,
    MessageError,
    encode,
)
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.records import RecordChannel
from swiftcache_tier.control.runtime_dir import DonorPaths, donor_paths
from swiftcache_tier.donor import server
from swiftcache_tier.donor.elastic import ElasticDonor
from swiftcache_tier.donor.plan import plan_pool_donor
from swiftcache_tier.extents.pool_memory import PoolMemory
from swiftcache_tier.settings import Settings

EXTENT_BYTES = 1 << 20
EXTENTS = 6


class Engine:
    """The scheduler's side, without an engine: every extent is free unless it is lent."""

    def __init__(self, runtime_dir: Path, settings: Settings, name: str = "engine") -> None:
        self.memory = PoolMemory("cpu", EXTENT_BYTES, EXTENTS)
        self.plan = plan_pool_donor(self.memory, donor_paths(runtime_dir, name), settings)
        self.settings = settings
        self.donor = ElasticDonor(self.plan, self.memory, settings)
        self.own = set(range(EXTENTS))
        self.donor.start()

    @property
    def spec(self) -> str:
        return self.plan.paths.spec

    def lend(self, extents: int) -> None:
        slots = sorted(self.own)[:extents]
        self.own.difference_update(slots)
        self.donor.lend(slots, self.donor.handed_over + len(slots))

    def poll(self) -> set[int]:
        back = self.donor.take_returned()
        assert not self.own.intersection(back), "an extent came back twice"
        self.own.update(back)
        assert self.donor.handed_over == EXTENTS - len(self.own)
        return self.own

    def close(self) -> None:
        assert self.donor.stop()
        self.memory.close()


@pytest.fixture
def engine(runtime_dir: Path, settings: Settings) -> Iterator[Engine]:
    engine = Engine(runtime_dir, settings)
    yield engine
    engine.close()


def test_more_extents_than_open_files_is_said_before_the_start(runtime_dir: Path) -> None:
    status, line = run_child(
        "import pathlib, resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from swiftcache_tier.control.runtime_dir import donor_paths\n"
        "from swiftcache_tier.donor.plan import plan_pool_donor\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "from swiftcache_tier.extents.pool_memory import PoolMemory\n"
        "from swiftcache_tier.settings import Settings\n"
        "memory = PoolMemory('cpu', 4096, 129)\n"
        f"paths = donor_paths(pathlib.Path({str(runtime_dir)!r}), 'engine')\n"
        "try: plan_pool_donor(memory, paths, Settings())\n"
        "except SwiftCacheError as error: print(error)\n"
    )
    assert status == 0
    assert line == (
        "129 extents of 4 KiB need 514 open files and the limit is 512: raise it (ulimit -Hn) or "
        "choose larger extents with SWIFTCACHE_EXTENT_BYTES\n"
    )


def lent(engine: Engine) -> int:
    return query_status(engine.plan.paths, engine.settings).extents["lent"]


def test_nothing_is_lent_before_the_engine_lends(
    engine: Engine, start_receiver: Any, wait_for: Callable[..., None]
) -> None:
    receiver = start_receiver("r", engine.spec)
    assert receiver("status")["blocks"]["total"] == 0
    wait_for(lambda: engine.donor.demand == EXTENTS, "the receiver wants all")
    engine.lend(2)
    wait_for(lambda: receiver("status")["bytes"] == 2 * EXTENT_BYTES, "two extents arrive")
    assert engine.poll() == set(range(2, EXTENTS))
    wait_for(lambda: engine.donor.demand == EXTENTS - 2, "the rest is wanted still")


def test_what_the_engine_wants_back_comes_back(
    engine: Engine, start_receiver: Any, wait_for: Callable[..., None]
) -> None:
    receiver = start_receiver("r", engine.spec)
    wait_for(lambda: engine.donor.demand == EXTENTS, "the receiver wants all")
    engine.lend(4)
    wait_for(lambda: receiver("status")["bytes"] == 4 * EXTENT_BYTES, "four extents arrive")
    engine.donor.aim(1)

    def three_are_back() -> bool:
        return len(engine.poll()) == EXTENTS - 1

    wait_for(three_are_back, "three come back")
    assert lent(engine) == 1
    assert receiver("status")["bytes"] == EXTENT_BYTES


def test_all_comes_back_when_a_receiver_dies(
    engine: Engine, start_receiver: Any, wait_for: Callable[..., None]
) -> None:
    receiver = start_receiver("r", engine.spec)
    wait_for(lambda: engine.donor.demand > 0, "the receiver wants some")
    engine.lend(EXTENTS)
    wait_for(lambda: receiver("status")["bytes"] == EXTENTS * EXTENT_BYTES, "all arrive")
    receiver.process.kill()
    wait_for(lambda: len(engine.poll()) == EXTENTS, "all come back")


def test_extents_nobody_wants_come_back(engine: Engine, wait_for: Callable[..., None]) -> None:
    engine.lend(3)
    wait_for(lambda: len(engine.poll()) == EXTENTS, "there is no receiver")


def test_receivers_share_fairly_and_within_their_limits(
    engine: Engine, start_receiver: Any, swiftcache: Any, wait_for: Callable[..., None]
) -> None:
    for name in "abc":
        start_receiver(name, engine.spec)

    def held() -> dict[str, int]:
        engine.poll()
        if engine.donor.demand and engine.own:
            engine.lend(min(engine.donor.demand, len(engine.own)))
        reply = query_status(engine.plan.paths, engine.settings)
        return {r.name: r.extents["lent"] for r in reply.receivers}

    wait_for(lambda: held() == {"a": 2, "b": 2, "c": 2}, "equal shares")
    assert swiftcache("limit", "engine", "1MiB", "--receiver", "a").returncode == 0
    wait_for(lambda: sorted(held().values()) == [1, 2, 3] and held()["a"] == 1, "a gives one")
    assert swiftcache("limit", "engine", "1MiB", "--each").returncode == 0
    wait_for(lambda: held() == {"a": 1, "b": 1, "c": 1}, "nobody has more than one")
    assert swiftcache("limit", "engine", "none", "--each").returncode == 0
    assert swiftcache("limit", "engine", "none", "--receiver", "a").returncode == 0
    assert swiftcache("limit", "engine", "3MiB").returncode == 0
    wait_for(lambda: held() == {"a": 1, "b": 1, "c": 1}, "three in all")
    assert swiftcache("limit", "engine", "none").returncode == 0
    wait_for(lambda: held() == {"a": 2, "b": 2, "c": 2}, "equal shares again")


def test_a_drained_engine_keeps_its_memory_until_the_limit_is_lifted(
    engine: Engine, start_receiver: Any, swiftcache: Any, wait_for: Callable[..., None]
) -> None:
    receiver = start_receiver("r", engine.spec)
    wait_for(lambda: engine.donor.demand > 0, "the receiver wants some")
    engine.lend(2)
    wait_for(lambda: receiver("status")["bytes"] == 2 * EXTENT_BYTES, "two extents arrive")
    receiver("vacate", False)
    receiver("take")  # in use: it gives nothing back
    late = swiftcache("drain", "engine", "--wait", "0.2")
    assert late.returncode == 1
    assert "still lends 2 MiB" in late.stdout
    assert "r (process" in late.stdout
    receiver("vacate", True)
    done = swiftcache("drain", "engine", "--wait", "30")
    assert done.returncode == 0, done.stderr
    assert (
        "engine is drained: nothing is lent until `swiftcache limit engine none`, or until it is "
        "started again" in done.stdout
    )
    wait_for(lambda: len(engine.poll()) == EXTENTS, "all is back")
    assert engine.donor.demand == 0
    status = swiftcache("status").stdout
    assert "drained, elastic" in status
    of_one = swiftcache("limit", "engine", "none", "--receiver", "r").stdout
    assert "drained" not in of_one, "it still is"
    assert "the drain of engine is lifted" in swiftcache("limit", "engine", "none").stdout
    wait_for(lambda: engine.donor.demand > 0, "it is wanted again")


def test_a_receiver_that_does_not_answer_degrades_what_it_holds(
    runtime_dir: Path, start_receiver: Any, settings: Settings, wait_for: Callable[..., None]
) -> None:
    engine = Engine(runtime_dir, replace(settings, reclaim_deadline_s=0.3))
    try:
        receiver = start_receiver("r", engine.spec)
        wait_for(lambda: engine.donor.demand > 0, "the receiver wants some")
        engine.lend(2)
        wait_for(lambda: receiver("status")["bytes"] == 2 * EXTENT_BYTES, "two extents arrive")
        receiver("vacate", False)
        receiver("take")  # in use: it gives nothing back
        engine.donor.aim(0)
        paths = engine.plan.paths
        wait_for(
            lambda: query_status(paths, engine.settings).extents["degraded"] == 2,
            "both are given up",
        )
        assert len(engine.poll()) == EXTENTS - 2, "and not used"
        receiver.process.kill()
        wait_for(lambda: len(engine.poll()) == EXTENTS, "until its process is gone")
    finally:
        engine.close()


def test_a_donor_that_fails_takes_no_more_and_says_so(
    engine: Engine,
    start_receiver: Any,
    swiftcache: Any,
    wait_for: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receiver = start_receiver("r", engine.spec)
    wait_for(lambda: engine.donor.demand == EXTENTS, "the receiver wants all")
    engine.lend(2)
    wait_for(lambda: receiver("status")["bytes"] == 2 * EXTENT_BYTES, "two extents arrive")

    def fail(now_s: float) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(engine.donor._server._lender, "tick", fail)
    wait_for(lambda: engine.donor._stuck is not None, "a heartbeat has failed")
    engine.lend(3)
    assert engine.poll() == set(range(2, EXTENTS)), "what no receiver has is back at once"
    assert engine.donor.demand == 0
    engine.donor.aim(0)
    assert engine.poll() == set(range(2, EXTENTS))
    assert sum("lending has failed" in record.message for record in caplog.records) == 1
    status = engine.donor.status()
    assert status is not None
    assert status.state == "failed"
    assert (status.extents["degraded"], status.extents["free"], status.kept) == (2, 4, 4)
    assert query_status(engine.plan.paths, engine.settings).state == "failed"
    assert "failed" in swiftcache("status").stdout
    (up,) = [
        family.samples
        for family in DonorCollector(engine.plan.paths.door.parent, engine.settings).collect()
        if family.name == "swiftcache_donor_up"
    ]
    assert [sample.value for sample in up] == [0]
    refused = swiftcache("limit", "engine", "none")
    assert refused.returncode != 0
    assert "start the server again" in refused.stderr


def test_a_receiver_that_nothing_can_be_sent_to_is_lost_alone(
    engine: Engine, wait_for: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = RecordChannel.send

    async def no_memory(channel: RecordChannel, payload: bytes, *descriptors: Any) -> None:
        if b"Welcome" in payload:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        await send(channel, payload, *descriptors)

    monkeypatch.setattr(RecordChannel, "send", no_memory)
    with connect_door(engine.plan.paths) as connection:
        connection.settimeout(60)
        connection.send(encode(Hello(protocol=PROTOCOL, receiver="r")))
        assert connection.recv(1) == b"", "its connection is closed"
    wait_for(lambda: not query_status(engine.plan.paths, engine.settings).receivers, "it is gone")
    assert query_status(engine.plan.paths, engine.settings).state == "serving"


def test_a_donor_that_ends_leaves_its_successors_sockets(
    runtime_dir: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    successors: list[socket.socket] = []

    class Door(socket.socket):
        """When the donor closes it, another takes the place before anything else happens."""

        def close(self) -> None:
            super().close()
            if not successors:
                successors.append(taken(engine.plan.paths))

    def taken(paths: DonorPaths, **_: Any) -> socket.socket:
        return take_door(paths, backlog=1, mode=0o600, lock_timeout_s=5.0)

    def door_of_engine(paths: DonorPaths, **_: Any) -> Door:
        return Door(fileno=taken(paths).detach())

    monkeypatch.setattr(server, "take_door", door_of_engine)
    engine = Engine(runtime_dir, settings)
    engine.close()
    try:
        connect_door(engine.plan.paths).close()
    finally:
        for door in successors:
            door.close()
        leave_door(engine.plan.paths)


def test_a_name_that_is_taken_is_refused(
    engine: Engine, settings: Settings, one_line: Callable[..., str]
) -> None:
    other = PoolMemory("cpu", EXTENT_BYTES, 1)
    plan = plan_pool_donor(other, engine.plan.paths, settings)
    said = one_line(ElasticDonor(plan, other, settings).start)
    assert "taken" in said
    assert "choose another with --port, or end that donor" in said
    other.close()


def test_only_its_user_limits_a_donor(engine: Engine) -> None:
    stranger = Peer(pid=1, uid=12345, pidfd=-1)
    for request in (DrainRequest(PROTOCOL), LimitRequest(PROTOCOL, bytes=0)):
        with pytest.raises(MessageError, match="only user"):
            engine.donor._server._answer(request, stranger)
