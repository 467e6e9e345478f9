"""Memory that is promised is not promised twice, although it is taken only as it is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.control.lendable import lendable_bytes
from swiftcache_tier.extents import Arena, HostArena
from swiftcache_tier.memory import available_host_bytes
from swiftcache_tier.receiver import check_specs
from swiftcache_tier.receiver.offered import offered_bytes
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs


class FixedArena(HostArena):
    """A machine where what is available does not change from one moment to the next."""

    def available_bytes(self) -> int:
        return 10 << 20


class GpuArena(FixedArena):
    device = "cuda:1"


@pytest.fixture
def most(settings: Settings) -> Settings:
    """Settings for donors of many gigabytes."""
    return replace(settings, extent_bytes=1 << 30, address_space_bytes=1 << 40)


def left(runtime_dir: Path, settings: Settings, arena: Arena | None = None) -> int:
    return lendable_bytes(arena or FixedArena(), runtime_dir, settings)


def test_what_donors_promise_is_not_lendable(
    runtime_dir: Path, settings: Settings, start_donor: Any
) -> None:
    assert left(runtime_dir / "absent", settings) == 10 << 20
    start_donor("a", "1MiB")
    assert left(runtime_dir, settings) == 9 << 20
    start_donor("b", "3MiB")
    assert left(runtime_dir, settings) == 6 << 20
    assert left(runtime_dir, settings, GpuArena()) == 10 << 20
    start_donor("c", "20MiB")
    assert left(runtime_dir, settings) == 0


def test_what_was_written_is_not_counted_twice(
    runtime_dir: Path, settings: Settings, start_donor: Any, start_tier: Any, wait_for: Any
) -> None:
    """The system does not call it available any more."""
    start_donor("a", "4MiB")
    user = start_tier()
    ids = user.tier.alloc(8)
    assert ids is not None
    user.write(ids, 1)
    assert left(runtime_dir, settings) == 7 << 20
    user.tier.free(ids)
    user.tier.close()
    wait_for(lambda: left(runtime_dir, settings) == 6 << 20, "the memory is given back")


def test_donors_that_have_ended_have_promised_nothing(
    runtime_dir: Path, settings: Settings, start_donor: Any
) -> None:
    donor = start_donor("a", "1MiB")
    donor.process.kill()
    donor.wait()
    assert left(runtime_dir, settings) == 10 << 20


def test_a_machine_is_not_lent_twice(
    runtime_dir: Path,
    most: Settings,
    start_donor: Any,
    start_tier: Any,
    swiftcache: Any,
    one_line: Any,
) -> None:
    size_bytes = available_host_bytes() * 6 // 10
    donor = start_donor("a", str(size_bytes), settings=most)
    done = swiftcache("donor", "--device", "host", "--size", str(size_bytes), "--name", "b")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "beyond what other donors have promised" in done.stderr
    line = one_line(lambda: check_specs(parse_specs([f"host={size_bytes}"]), runtime_dir, most))
    assert "beyond what other donors have promised" in line
    donor.end_at_once()
    check_specs(parse_specs([f"host={size_bytes}"]), runtime_dir, most)


def test_auto_takes_half_of_what_is_not_promised(
    most: Settings, start_receiver: Any, start_tier: Any
) -> None:
    free_bytes = available_host_bytes()
    start_receiver("owner", f"host={free_bytes * 6 // 10}", settings=most)
    user = start_tier(settings=most)
    # Half of four tenths, to the next gigabyte below, and not half of all.
    assert user.tier.status()["bytes"] < free_bytes * 3 // 10


def test_what_a_server_would_take_for_itself_is_within_the_limit_on_open_files(
    runtime_dir: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (260, 260))
    assert offered_bytes(parse_specs([]), runtime_dir, settings) == (4 << 20,)
