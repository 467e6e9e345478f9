"""A server that lends: it waits for memory of a killed one of its name, and leaves no sockets."""

from __future__ import annotations

import os
import pickle
import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import prepare_server_args

from sglang.srt.swiftcache import donate_checks, succession
from support.fake_clock import FakeClock
from support.fake_nvml import FakeGpu, FakeNvml, gpu_uuid
from swiftcache_tier.control.door import leave_door, take_door
from swiftcache_tier.control.runtime_dir import DonorPaths
from swiftcache_tier.donor import orphans
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena
from swiftcache_tier.receiver.probe import Answer, Question
from swiftcache_tier.settings import Settings

SETTINGS = Settings()
GIB = 1 << 30


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    for module in (succession, orphans):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is to be called when the process ends."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        succession, "atexit", SimpleNamespace(register=lambda *call: calls.append(call))
    )
    return calls


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    runtime_dir = tmp_path / "rt"
    runtime_dir.mkdir(mode=0o700)
    return SimpleNamespace(
        device="cpu",
        base_gpu_id=0,
        port=30000,
        swiftcache_donate="auto",
        swiftcache_runtime_dir=str(runtime_dir),
    )


def paths_of(args: Any) -> DonorPaths:
    paths = donate_checks.own_donor(args)
    assert paths is not None
    return paths


def open_door(args: Any) -> socket.socket:
    paths = paths_of(args)
    door = take_door(paths, backlog=1, mode=0o600, lock_timeout_s=5.0)
    paths.control.touch()
    return door


@pytest.fixture
def left(args: Any) -> None:
    """The sockets of a server that was killed."""
    open_door(args).close()


def test_it_waits_for_host_memory_of_a_killed_server_of_its_name(
    args: Any, left: None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        HostArena, "available_bytes", lambda _: 4 * GIB + (GIB if clock.now_s >= 1 else 0)
    )
    succession.prepare(args)
    assert clock.now_s == pytest.approx(1 + 2 * SETTINGS.heartbeat_s, abs=0.5)


def test_it_waits_for_memory_of_its_own_gpu(
    args: Any, left: None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.device, args.base_gpu_id = "cuda", 1
    asked: list[Any] = []

    def answer(*question: Any) -> list[Answer]:
        asked.append(question[:2])
        return [Answer(None, 0, gpu_uuid(5))]  # CUDA_VISIBLE_DEVICES has its say

    gpu = FakeGpu(5, free_bytes=4 * GIB)
    for free_gib in (5, 6, 7):
        clock.at(free_gib - 4, lambda gib=free_gib: setattr(gpu, "free_bytes", gib * GIB))
    monkeypatch.setattr(succession, "probe", answer)
    monkeypatch.setattr(succession, "load_nvml", lambda: FakeNvml(FakeGpu(1), gpu))
    succession.prepare(args)
    assert asked == [("cuda:1", [Question("cuda:1", None)])]
    assert clock.now_s == pytest.approx(3 + 2 * SETTINGS.heartbeat_s, abs=0.5)


def test_without_nvml_it_does_not_wait_for_long(
    args: Any, left: None, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.device = "cuda"
    monkeypatch.setattr(succession, "probe", lambda *_: [Answer(None, 0, gpu_uuid(0))])
    monkeypatch.setattr(succession, "load_nvml", lambda: None)
    succession.prepare(args)
    assert clock.now_s == pytest.approx(2 * SETTINGS.heartbeat_s, abs=0.5)


def test_a_gpu_that_is_not_there_is_one_line(
    args: Any, left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.device = "cuda"
    monkeypatch.setattr(succession, "probe", lambda *_: [Answer("device 'cuda:0' cannot be used")])
    with pytest.raises(SwiftCacheError, match="'cuda:0' cannot be used"):
        succession.prepare(args)


def test_where_no_server_was_killed_it_does_not_wait(
    args: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    args.device = "cuda"
    monkeypatch.delattr(succession, "probe")  # nor does it ask
    succession.prepare(args)
    with closing(open_door(args)):  # its start is refused later, by name
        succession.prepare(args)
    assert clock.now_s == 0


def test_sockets_go_when_the_process_ends(
    args: Any, at_exit: list[tuple[Any, ...]], clock: FakeClock
) -> None:
    succession.prepare(args)
    args.port = 30001  # as a `Runtime` does, whose port is taken
    open_door(args).close()
    ((function, *arguments),) = at_exit
    function(*arguments)
    assert not set(paths_of(args)) & set(paths_of(args).door.parent.iterdir())
    assert clock.now_s == 0
    function(*arguments)
    args.swiftcache_runtime_dir += "/absent"
    function(*arguments)


def test_sockets_go_as_soon_as_the_scheduler_has(args: Any, clock: FakeClock) -> None:
    clock.at(1, open_door(args).close)
    succession.remove_sockets(args, SETTINGS)
    assert not set(paths_of(args)) & set(paths_of(args).door.parent.iterdir())


@pytest.mark.parametrize(("age_s", "waits"), [(0, True), (3600, False)])
def test_the_next_server_waits_after_one_that_was_interrupted_lately(
    args: Any, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, age_s: float, waits: bool
) -> None:
    monkeypatch.setattr(HostArena, "available_bytes", lambda _: GIB)
    open_door(args).close()
    succession.remove_sockets(args, SETTINGS)  # as on Ctrl-C: the scheduler has been killed
    folder = paths_of(args).door.parent
    (mark,) = folder.iterdir()
    ended_s = mark.stat().st_mtime - age_s
    os.utime(mark, (ended_s, ended_s))
    succession.prepare(args)
    assert (clock.now_s > 0) == waits
    assert list(folder.iterdir()) == [], "the next but one waits as well"


def test_a_scheduler_that_goes_between_two_looks_leaves_a_mark(
    args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, clear = open_door(args), succession.clear_door

    def goes_first(paths: DonorPaths, *, lock_timeout_s: float) -> bool:
        door.close()
        return clear(paths, lock_timeout_s=lock_timeout_s)

    monkeypatch.setattr(succession, "clear_door", goes_first)
    succession.remove_sockets(args, SETTINGS)
    assert len(list(paths_of(args).door.parent.iterdir())) == 1


def test_a_donor_that_took_everything_back_leaves_no_mark(args: Any) -> None:
    open_door(args).close()
    leave_door(paths_of(args))
    succession.remove_sockets(args, SETTINGS)
    assert list(paths_of(args).door.parent.iterdir()) == []


def test_sockets_of_a_server_that_lives_stay(args: Any, clock: FakeClock) -> None:
    with closing(open_door(args)):
        succession.remove_sockets(args, SETTINGS)
        assert set(paths_of(args).door.parent.iterdir()) == set(paths_of(args))
    assert clock.now_s == pytest.approx(SETTINGS.scheduler_end_timeout_s, abs=0.5)


def test_only_the_process_that_reads_the_flags_sees_to_it(
    tiny_model: Path,
    tmp_path: Path,
    at_exit: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWIFTCACHE_RUNTIME_DIR", str(tmp_path / "absent"))
    flags = ["--model-path", str(tiny_model), "--device", "cpu"]
    prepare_server_args([*flags, "--attention-backend", "torch_native"])
    assert at_exit == []
    args = prepare_server_args([*flags, "--swiftcache-donate", "auto"])
    assert [call[1] for call in at_exit] == [args]
    pickle.loads(pickle.dumps(args))  # as the scheduler process gets them
    assert len(at_exit) == 1
