"""A donor that is started again while the memory of its predecessor is still with receivers."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.donor import plan
from swiftcache_tier.errors import SwiftCacheError


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
