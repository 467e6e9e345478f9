"""Memory goes from donors to receivers and back: real processes, nobody fails."""

from __future__ import annotations

import gc
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from support.raw_memory import no_descriptor_leaks
from swiftcache_tier.receiver import tier as tier_module
from swiftcache_tier.settings import Settings

BLOCK = 1 << 17  # eight to an extent


def test_blocks_are_read_back_as_written(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "4MiB")
    user = start_tier(donor.spec)
    tier = user.tier
    assert tier.total_blocks == tier.free_blocks == 32
    ids = user.take_all()
    assert ids.dtype == np.int64
    assert tier.alloc(1) is None
    for value, block in enumerate(ids):
        user.write(np.array([block]), value)
    for value, block in enumerate(ids):
        assert user.holds(np.array([block]), value)
    assert (tier.free_blocks, tier.used_blocks) == (0, 32)
    assert [tier.donor_names()[key] for key in tier.donor_of(ids[:2])] == ["a", "a"]
    tier.free(ids)
    assert tier.free_blocks == 32
    assert donor.extents("lent") == 4


def test_memory_is_as_large_as_it_says(start_donor: Any, start_tier: Any) -> None:
    """Blocks of three quarters of an extent straddle the edges."""
    donor = start_donor("a", "4MiB")
    user = start_tier(donor.spec, block_bytes=3 << 18)
    ids = user.take_all()
    assert len(ids) == 5
    for block in ids:
        user.write(np.array([block]), int(block) % 251 + 1)
    assert all(user.holds(np.array([block]), int(block) % 251 + 1) for block in ids)


def test_one_table_names_blocks_of_several_donors(start_donor: Any, start_tier: Any) -> None:
    donors = [start_donor("a", "2MiB"), start_donor("b", "2MiB")]
    user = start_tier(*(donor.spec for donor in donors))
    ids = user.take_all()
    assert len(ids) == 32
    keys, counts = np.unique(user.tier.donor_of(ids), return_counts=True)
    assert {user.tier.donor_names()[key] for key in keys} == {"a", "b"}
    assert counts.tolist() == [16, 16]
    user.write(ids, 7)
    assert user.holds(ids, 7)
    addresses = user.tier.addresses(ids)
    assert np.array_equal(addresses, user.tier.base_address + ids * BLOCK)


def test_the_next_owner_reads_zeros(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "2MiB")
    first = start_tier(donor.spec)
    first.write(first.take_all(), 0xAA)
    first.tier.close()
    second = start_tier(donor.spec)
    ids = second.take_all()
    assert len(ids) == 16
    assert second.holds(ids, 0)


def test_receivers_share_fairly(start_donor: Any, start_tier: Any, start_receiver: Any) -> None:
    donor = start_donor("a", "4MiB")
    first = start_tier(donor.spec)
    ids = first.take_all()
    first.write(ids, 1)

    def vacate_until_second_has_started() -> bool:
        first.tier.free(first.tier.must_vacate())
        return starting.done()

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start_receiver, "second", donor.spec)
        first.poll_for(vacate_until_second_has_started, "the second receiver gets its share")
    second = starting.result()
    assert second("take") == [0]
    kept = first.tier.used_blocks
    assert kept == 16
    status = donor.status()
    assert sorted((r.name, r.extents["lent"]) for r in status.receivers) == [
        ("second", 2),
        ("test", 2),
    ]
    assert second("close") is None
    first.poll_for(lambda: first.tier.total_blocks == 32, "it gets all back when the other left")
    new = first.take_all()
    assert first.holds(new, 0)


def test_a_donor_that_ends_gets_everything_back(start_donor: Any, start_tier: Any) -> None:
    leaving, staying = start_donor("leaving", "2MiB"), start_donor("staying", "2MiB")
    user = start_tier(leaving.spec, staying.spec)
    ids = user.take_all()
    user.write(ids, 5)
    leaving.signal(signal.SIGTERM)
    user.poll_for(lambda: user.tier.must_vacate().size, "the donor asks its memory back")
    doomed = user.tier.must_vacate()
    names = user.tier.donor_names()
    assert {names[key] for key in user.tier.donor_of(doomed)} == {"leaving"}
    assert user.holds(doomed, 5)
    assert leaving.process.poll() is None
    assert user.tier.alloc(1) is None
    user.tier.free(doomed[:9])
    user.poll_for(lambda: leaving.extents("free") == 1, "what is vacated goes back at once")
    assert user.holds(doomed[9:], 5)
    user.tier.free(doomed[9:])
    user.poll_for(lambda: leaving.process.poll() is not None, "the donor ends")
    assert leaving.wait() == 0
    assert not any(path.exists() for path in leaving.paths)
    user.poll_for(lambda: list(user.tier.donor_names().values()) == ["staying"], "it is forgotten")
    kept = np.setdiff1d(ids, doomed)
    assert user.holds(kept, 5)
    assert user.tier.status()["reclaims"]["in_time"] == 1
    assert user.tier.must_vacate().size == 0


def test_a_donor_that_ends_does_not_wait_for_ever(
    start_donor: Any, start_tier: Any, settings: Settings
) -> None:
    donor = start_donor("a", "2MiB", settings=replace(settings, reclaim_deadline_s=0.2))
    user = start_tier(donor.spec)
    ids = user.take_all()
    user.write(ids, 9)
    donor.signal(signal.SIGTERM)
    assert donor.wait() == 0
    assert "2 extents (2 MiB) are still with receivers" in donor.log()
    user.poll_for(lambda: user.tier.must_vacate().size == 16, "the receiver notices")
    assert user.holds(ids, 9)
    user.tier.free(ids)
    user.poll_for(lambda: user.tier.total_blocks == 0, "its memory is unmapped")


def test_a_reclaim_is_late_where_the_scheduler_was_stuck(
    start_donor: Any,
    start_tier: Any,
    settings: Settings,
    wait_for: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not even see in time that it is asked."""
    caplog.set_level(logging.INFO)
    donor = start_donor("a", "2MiB")
    user = start_tier(donor.spec)
    donor.signal(signal.SIGTERM)
    wait_for(lambda: "asks 2 extents (2 MiB) back" in caplog.text, "the donor asks")
    stuck_s = 2 * settings.reclaim_deadline_s
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + stuck_s)
    monkeypatch.setattr(tier_module, "time", later)
    user.poll_for(lambda: donor.process.poll() is not None, "the donor ends")
    reclaims = user.tier.status()["reclaims"]
    assert (reclaims["asked"], reclaims["in_time"], reclaims["late"]) == (1, 0, 1)
    assert reclaims["seconds"] > stuck_s
    (spent_s,) = user.tier.reclaim_seconds
    assert spent_s > stuck_s


def test_a_second_interrupt_ends_a_donor_at_once(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "2MiB")
    user = start_tier(donor.spec)
    user.take_all()
    donor.signal(signal.SIGINT)
    user.poll_for(lambda: donor.status().state == "draining", "the donor drains")
    donor.signal(signal.SIGINT)
    assert donor.wait() == 130
    assert not any(path.exists() for path in donor.paths)


def test_auto_joins_what_comes_later(start_donor: Any, start_tier: Any) -> None:
    start_donor("early", "2MiB")
    user = start_tier()
    assert user.tier.total_blocks == 16
    start_donor("late", "1MiB")
    user.poll_for(lambda: user.tier.total_blocks == 24, "the donor that came later is joined")
    assert sorted(user.tier.donor_names().values()) == ["early", "late"]


def test_a_named_donor_that_comes_back_is_joined_again(start_donor: Any, start_tier: Any) -> None:
    first = start_donor("a", "1MiB")
    user = start_tier(first.spec)
    (old_key,) = user.tier.donor_names()
    first.signal(signal.SIGTERM)
    user.poll_for(lambda: first.process.poll() is not None, "the donor ends")
    assert first.wait() == 0
    user.poll_for(lambda: user.tier.total_blocks == 0, "its memory is given back")
    start_donor("a", "2MiB")
    user.poll_for(lambda: user.tier.total_blocks == 16, "the donor that came back is joined")
    assert list(user.tier.donor_names().values()) == ["a"]
    assert old_key not in user.tier.donor_names()


def test_a_tier_leaves_no_trace(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "2MiB")
    start_tier(donor.spec).tier.close()  # what is made once in a process is made now
    gc.collect()
    with no_descriptor_leaks():
        user = start_tier(donor.spec)
        user.write(user.take_all(), 1)
        user.tier.close()
        user.tier.close()
        gc.collect()
    assert donor.extents("free") == 2
    assert donor.status().receivers == []


def test_a_donor_keeps_no_descriptor_of_those_who_left(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "2MiB")
    process = psutil.Process(donor.process.pid)
    start_tier(donor.spec).tier.close()
    before = process.num_fds()
    for _ in range(3):
        start_tier(donor.spec).tier.close()
    assert process.num_fds() <= before


@pytest.mark.parametrize("block_bytes", [2 << 20, 8 << 20])
def test_memory_without_room_for_a_block_is_refused(
    start_donor: Any, start_tier: Any, one_line: Any, block_bytes: int
) -> None:
    donor = start_donor("a", "1MiB")
    line = one_line(lambda: start_tier(donor.spec, block_bytes=block_bytes))
    assert "1 MiB" in line
    assert "block" in line
    assert donor.extents("free") == 1


def test_a_start_that_fails_leaves_nothing(
    start_donor: Any, start_tier: Any, one_line: Any, runtime_dir: Any, settings: Settings
) -> None:
    taken = start_donor("a", "1MiB", settings=replace(settings, sessions_max=1))
    first = start_tier(taken.spec)
    line = one_line(lambda: start_tier("host=2MiB", taken.spec))
    assert "already serves 1 receivers" in line
    # The donor that the failed receiver had started for itself is gone.
    assert sorted(path.name for path in runtime_dir.iterdir()) == ["a.ctl", "a.fds"]
    assert first.tier.total_blocks == 8
