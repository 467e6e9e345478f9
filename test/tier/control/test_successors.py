"""A donor that is started again while the memory of its predecessor is still with receivers."""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.fake_clock import FakeClock
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.donor import orphans, plan
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.settings import Settings


def planned(runtime_dir: Path, settings: Any, name: str = "a") -> plan.DonorPlan:
    return plan.plan_donor(
        device="host",
        size_bytes=4 << 20,
        name=name,
        runtime_dir=runtime_dir,
        extent_bytes=1 << 20,
        allow_users=(),
        owner=None,
        settings=settings,
    )


@pytest.fixture
def left_door(runtime_dir: Path) -> Iterator[Path]:
    """The socket of a donor that was killed."""
    paths = donor_paths(runtime_dir, "a")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as door:
        door.bind(str(paths.door))
    yield paths.door
    paths.door.unlink()


def lend(monkeypatch: pytest.MonkeyPatch, *mebibytes: int) -> Iterator[int]:
    """What is available at each look, the last one for ever."""
    looks = itertools.chain(mebibytes, itertools.repeat(mebibytes[-1]))
    monkeypatch.setattr(plan, "lendable_bytes", lambda *_: next(looks) << 20)
    return looks


def test_it_waits_until_receivers_have_vacated_it(
    runtime_dir: Path, settings: Any, left_door: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend(monkeypatch, 0, 0, 2, 4)
    assert planned(runtime_dir, settings).extents == 4


def test_it_does_not_wait_for_ever(
    runtime_dir: Path, settings: Any, left_door: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend(monkeypatch, 2)
    hasty = replace(settings, lost_after_s=0.2, reclaim_deadline_s=0.2)
    with pytest.raises(SwiftCacheError, match="available now"):
        planned(runtime_dir, hasty)


def test_where_no_donor_was_killed_it_does_not_wait(
    runtime_dir: Path, settings: Any, left_door: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lend(monkeypatch, 0, 4)
    with pytest.raises(SwiftCacheError, match="available now"):
        planned(runtime_dir, settings, name="b")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(orphans, "time", fake)
    return fake


# A successor that takes whatever there is, as a serving engine does. The default settings: a
# heartbeat of 1 s, extents of 64 MiB, 10 s for receivers to notice and to vacate.
@pytest.mark.parametrize(
    ("mebibytes_at", "waited_s", "came_back"),
    [
        (lambda _: 500, 2, "0 B"),
        (lambda s: 500 + 64 * min(s // 1, 5), 7, "320 MiB"),
        (lambda s: 500 + 64 * (s // 1), 10, "640 MiB"),
        # What other processes do: neither does it keep a start waiting, nor hide what comes back.
        (lambda s: 500 + 40 * (int(s * 5) % 2), 2, "0 B"),
        (lambda s: 500 - 40 * s, 2, "0 B"),
        (lambda s: 500 + 40 * min(s, 4), 5, "160 MiB"),
    ],
    ids=["nothing", "for-5-s", "for-ever", "noise", "others-take-it", "less-than-an-extent-a-s"],
)
def test_one_that_takes_all_waits_until_nothing_has_come_for_two_heartbeats(
    clock: FakeClock,
    caplog: pytest.LogCaptureFixture,
    mebibytes_at: Callable[[float], float],
    waited_s: float,
    came_back: str,
) -> None:
    caplog.set_level(logging.INFO)
    available_bytes = orphans.wait_for_orphans(
        "a", lambda: int(mebibytes_at(clock.now_s)) << 20, Settings()
    )
    assert available_bytes == int(mebibytes_at(clock.now_s)) << 20
    assert clock.now_s == pytest.approx(waited_s, abs=0.5)
    (line,) = caplog.messages
    assert (
        f"memory of a, which was killed, that receivers still held: {came_back} came back" in line
    )
