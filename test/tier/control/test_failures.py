"""Donors and receivers fall silent, are killed, come back."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
from tier.control.conftest import donors_started_with


def test_memory_outlives_a_donor_that_is_killed(start_donor: Any, start_tier: Any) -> None:
    donor, other = start_donor("a", "2MiB"), start_donor("b", "2MiB")
    user = start_tier(donor.spec, other.spec)
    ids = user.take_all()
    user.write(ids, 3)
    donor.signal(signal.SIGKILL)
    user.poll_for(lambda: user.tier.must_vacate().size == 16, "the loss is noticed")
    doomed = user.tier.must_vacate()
    assert user.holds(ids, 3)
    assert user.tier.status()["orphaned_extents"] == 2
    assert {d["name"]: d["state"] for d in user.tier.status()["donors"]} == {
        "a": "lost",
        "b": "joined",
    }
    user.tier.free(doomed)
    assert user.tier.alloc(1) is None, "no new blocks are placed on a lost donor"
    user.poll_for(lambda: len(user.tier.status()["donors"]) == 1, "the donor is forgotten")
    assert user.holds(np.setdiff1d(ids, doomed), 3)
    assert user.tier.must_vacate().size == 0
    assert user.tier.status()["orphaned_extents"] == 0


def test_blocks_of_a_lost_donor_pass_a_deadline_and_no_others_do(
    start_donor: Any, start_tier: Any, hasty: Any
) -> None:
    donor, other = start_donor("a", "1MiB"), start_donor("b", "1MiB")
    user = start_tier(donor.spec, other.spec, settings=replace(hasty, drain_deadline_s=0.1))
    ids = user.take_all()
    assert not user.tier.past_deadline(ids).any()
    donor.signal(signal.SIGKILL)
    user.poll_for(lambda: user.tier.past_deadline(ids).any(), "the deadline passes")
    late = ids[user.tier.past_deadline(ids)]
    assert sorted(late) == sorted(user.tier.must_vacate())


def test_a_killed_donor_is_started_again_under_its_name(start_donor: Any, start_tier: Any) -> None:
    donor = start_donor("a", "1MiB")
    user = start_tier()
    ids = user.take_all()
    user.write(ids, 3)
    donor.signal(signal.SIGKILL)
    donor.wait()
    again = start_donor("a", "1MiB")  # finds the sockets that the first left
    # Joined as new beside what is left of the first.
    user.poll_for(lambda: user.tier.free_blocks == 8, "the new donor is joined")
    assert list(user.tier.donor_names().values()) == ["a", "a"]
    assert user.holds(ids, 3)
    new = user.take_all()
    assert user.holds(new, 0)
    user.tier.free(ids)
    user.poll_for(lambda: len(user.tier.donor_names()) == 1, "the first is forgotten")
    assert again.extents("lent") == 1
    user.write(new, 4)
    assert user.holds(new, 4)


def test_what_a_killed_receiver_held_is_scrubbed_and_lent_again(
    start_donor: Any, start_receiver: Any, start_tier: Any, wait_for: Any
) -> None:
    donor = start_donor("a", "2MiB")
    receiver = start_receiver("first", donor.spec)
    assert receiver("fill", 0xEE) == 16
    assert donor.extents("lent") == 2
    receiver.signal(signal.SIGKILL)
    wait_for(lambda: donor.extents("free") == 2, "its extents are free")
    assert donor.status().receivers == []
    user = start_tier(donor.spec)
    ids = user.take_all()
    assert len(ids) == 16
    assert user.holds(ids, 0)


def test_a_receiver_that_is_stopped_keeps_its_memory(
    start_donor: Any, start_receiver: Any, hasty: Any, wait_for: Any, child_env: Any
) -> None:
    donor = start_donor("a", "2MiB", settings=hasty)
    receiver = start_receiver("first", donor.spec)
    receiver("fill", 0x55)
    receiver.signal(signal.SIGSTOP)
    wait_for(lambda: donor.extents("orphaned") == 2, "the donor notices the silence")
    # Another receiver asks, and gets nothing of it.
    other = start_in_vain(donor, child_env(replace(hasty, join_timeout_s=1.0)))
    assert "granted no memory" in other
    assert donor.extents("orphaned") == 2
    receiver.signal(signal.SIGCONT)
    wait_for(lambda: donor.extents("lent") == 2, "it speaks again and keeps what it has")
    assert receiver("bytes_seen") == [0x55]
    assert receiver("status")["blocks"]["used"] == 16


def start_in_vain(donor: Any, env: dict[str, str]) -> str:
    """What a receiver that is told to use `donor` says at its end."""
    script = (
        "import sys; from pathlib import Path\n"
        "from swiftcache_tier.receiver import DonorTier\n"
        "from swiftcache_tier.settings import Settings\n"
        "from swiftcache_tier.spec import parse_specs\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "tier = DonorTier(parse_specs(sys.argv[1]), 4096, settings=Settings.from_env(),\n"
        "                 runtime_dir=Path('/nowhere'), receiver_name='other')\n"
        "try: tier.start()\n"
        "except SwiftCacheError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, donor.spec],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_a_receiver_that_is_stopped_and_killed_frees_its_memory(
    start_donor: Any, start_receiver: Any, hasty: Any, wait_for: Any
) -> None:
    donor = start_donor("a", "1MiB", settings=hasty)
    receiver = start_receiver("first", donor.spec)
    receiver.signal(signal.SIGSTOP)
    wait_for(lambda: donor.extents("orphaned") == 1, "the donor notices the silence")
    receiver.signal(signal.SIGKILL)
    wait_for(lambda: donor.extents("free") == 1, "its extents are free")


def test_a_donor_that_is_stopped_is_given_up_and_joined_again(
    start_donor: Any, start_tier: Any, hasty: Any
) -> None:
    donor = start_donor("a", "1MiB")
    user = start_tier(donor.spec, settings=hasty)
    ids = user.take_all()
    user.write(ids, 6)
    donor.signal(signal.SIGSTOP)
    user.poll_for(lambda: user.tier.must_vacate().size == 8, "the silence is noticed")
    assert user.holds(ids, 6)
    user.tier.free(ids)
    user.poll_for(lambda: not user.tier.donor_names(), "the donor is forgotten")
    donor.signal(signal.SIGCONT)
    user.poll_for(lambda: user.tier.free_blocks == 8, "it is joined again")
    new = user.take_all()
    assert user.holds(new, 0)
    assert len(donor.status().receivers) == 1


def test_a_receiver_that_is_late_with_a_reclaim_keeps_the_memory_until_it_is_done(
    start_donor: Any, start_receiver: Any, settings: Any, wait_for: Any
) -> None:
    donor = start_donor("a", "1MiB", settings=replace(settings, reclaim_deadline_s=1.0))
    receiver = start_receiver("first", donor.spec)
    receiver("fill", 0x77)
    receiver("vacate", False)
    donor.signal(signal.SIGTERM)
    assert donor.wait() == 0
    assert receiver("bytes_seen") == [0x77]
    receiver("vacate", True)
    wait_for(lambda: receiver("status")["donors"] == [], "it is vacated and forgotten")


def test_memory_that_is_not_given_back_in_time_is_degraded_until_it_is(
    start_donor: Any, start_receiver: Any, swiftcache: Any, settings: Any, wait_for: Any
) -> None:
    donor = start_donor("a", "4MiB", settings=replace(settings, reclaim_deadline_s=0.3))
    receiver = start_receiver("first", donor.spec)
    receiver("fill", 0x77)
    receiver("vacate", False)
    assert swiftcache("limit", "a", "1MiB").returncode == 0
    wait_for(lambda: donor.extents("degraded") == 3, "the deadline has passed")
    assert "first (process" in donor.log()
    assert "degraded" in donor.log()
    # The donor goes on with what it has, and its receiver with all that it has not given back.
    assert swiftcache("limit", "a", "none").returncode == 0
    assert (donor.extents("lent"), donor.extents("free")) == (1, 0)
    assert receiver("bytes_seen") == [0x77]
    receiver("vacate", True)
    wait_for(lambda: donor.extents("lent") == 4, "it is released, and lent again")
    receiver("take")
    assert receiver("bytes_seen") == [0x00, 0x77]


def test_a_limit_under_one_extent_is_refused_and_asks_nothing_back(
    start_donor: Any, start_receiver: Any, swiftcache: Any
) -> None:
    donor = start_donor("a", "4MiB")
    start_receiver("first", donor.spec)
    for whom in ([], ["--each"], ["--receiver", "first"]):
        done = swiftcache("limit", "a", "512KiB", *whom)
        assert done.returncode == 2
        assert "512 KiB is less than one extent of a, which are of 1 MiB" in done.stderr
        assert "or 0 to let it lend nothing" in done.stderr
    status = donor.status()
    assert (status.limit_bytes, status.each_limit_bytes) == (None, None)
    assert donor.extents("lent") == 4
    done = swiftcache("limit", "a", "2.5MiB")
    assert "at most 2 MiB (2 extents)" in done.stdout
    assert swiftcache("limit", "a", "0").returncode == 0
    assert donor.status().limit_bytes == 0


def test_a_limit_on_nobody_is_said_to_be_one_and_shown_as_long_as_it_holds(
    start_donor: Any, start_receiver: Any, swiftcache: Any
) -> None:
    donor = start_donor("a", "4MiB")
    start_receiver("first", donor.spec)
    done = swiftcache("limit", "a", "1MiB", "--receiver", "ghost")
    assert done.returncode == 0
    assert "lends ghost at most 1 MiB (1 extent);" in done.stdout
    assert "no receiver named ghost borrows from it now: the limit is kept" in done.stdout
    assert "also" not in done.stdout
    done = swiftcache("limit", "a", "3MiB", "--each")
    assert "no receiver" not in done.stdout
    assert "limits that it also has: ghost at most 1 MiB\n" in done.stdout
    done = swiftcache("limit", "a", "none")
    assert "limits that it also has: each receiver at most 3 MiB, ghost at most" in done.stdout
    assert "\na lends each receiver at most 3 MiB, ghost at most 1" in swiftcache("status").stdout
    (shown,) = json.loads(swiftcache("status", "--json").stdout)["donors"]
    assert shown["limits"] == {
        "bytes": None,
        "each_bytes": 3 << 20,
        "receiver_bytes": {"ghost": 1 << 20},
    }
    done = swiftcache("limit", "a", "4MiB", "--receiver", "first")
    assert "no receiver" not in done.stdout
    for whom in (["--receiver", "first"], ["--receiver", "ghost"], ["--each"]):
        done = swiftcache("limit", "a", "none", *whom)
    assert "also" not in done.stdout
    assert "at most" not in swiftcache("status").stdout
    done = swiftcache("limit", "a", "none", "--receiver", "ghost")
    assert done.stdout.endswith("no receiver named ghost borrows from it now\n")


def test_degraded_memory_is_free_when_its_holder_has_ended(
    start_donor: Any, start_receiver: Any, swiftcache: Any, settings: Any, wait_for: Any
) -> None:
    """Also when it hung by then, and did not say that it is there."""
    donor = start_donor("a", "4MiB", settings=replace(settings, reclaim_deadline_s=0.3))
    receiver = start_receiver("first", donor.spec)
    receiver("fill", 0x77)
    receiver("vacate", False)
    assert swiftcache("limit", "a", "1MiB").returncode == 0
    wait_for(lambda: donor.extents("degraded") == 3, "the deadline has passed")
    receiver.signal(signal.SIGSTOP)
    receiver.signal(signal.SIGKILL)
    wait_for(lambda: donor.extents("free") == 4, "its extents are free")


def test_an_owned_donor_ends_with_its_owner(
    start_receiver: Any, runtime_dir: Any, wait_for: Any
) -> None:
    """Also when all of its owner's tree is killed at once, which is how servers end."""
    receiver = start_receiver("first", "host=2MiB")
    assert receiver("fill", 1) == 16
    (donor,) = (psutil.Process(d["pid"]) for d in receiver("status")["donors"])
    assert f"{receiver.process.pid}" in donor.cmdline()
    assert os.getsid(donor.pid) == donor.pid
    owner = psutil.Process(receiver.process.pid)
    tree = owner.children(recursive=True)
    assert donor not in tree
    for process in [*tree, owner]:
        process.kill()
    wait_for(lambda: has_ended(donor), "the donor has ended")
    wait_for(lambda: not any(runtime_dir.iterdir()), "its sockets are removed")


def test_an_owner_that_ends_at_once_leaves_no_donor(
    runtime_dir: Any, settings: Any, child_env: Any, wait_for: Any
) -> None:
    """Wherever the donor's start has got to by then."""
    script = (
        "import os, subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'swiftcache_tier', 'donor', *sys.argv[2:]]\n"
        "subprocess.Popen([*command, '--owner-pid', str(os.getpid())])\n"
        "time.sleep(float(sys.argv[1]))\n"
    )
    flags = ["--device", "host", "--size", "1MiB", "--runtime-dir", str(runtime_dir)]
    for lifetime_s in ("0", "0.1", "0.3", "0.6"):
        subprocess.run(
            [sys.executable, "-c", script, lifetime_s, *flags],
            env=child_env(settings),
            capture_output=True,  # returns at the end of all that write there
            timeout=60,
            check=True,
        )
        assert list(runtime_dir.iterdir()) == []


def test_an_owned_donor_that_does_not_end_is_killed(start_tier: Any, settings: Any) -> None:
    hasty = replace(settings, owned_end_timeout_s=0.2, leave_timeout_s=0.2)
    user = start_tier("host=1MiB", settings=hasty)
    (donor,) = (psutil.Process(d["pid"]) for d in user.tier.status()["donors"])
    donor.suspend()
    user.tier.close()
    assert has_ended(donor)


def has_ended(process: psutil.Process) -> bool:
    """Whoever is its parent by now may not have asked for its exit status yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_an_owned_donor_serves_its_owner_alone(
    start_receiver: Any, start_tier: Any, runtime_dir: Any, one_line: Any, settings: Any
) -> None:
    owner = start_receiver("owner", "host=2MiB")
    (door,) = runtime_dir.glob("*.fds")
    line = one_line(lambda: start_tier(f"ipc://{door}"))
    assert f"serves process {owner.process.pid} alone" in line
    # `auto` passes it over, and starts a donor of its own instead.
    user = start_tier(settings=replace(settings, extent_bytes=1 << 30, address_space_bytes=1 << 40))
    assert len(user.tier.donor_names()) == 1
    assert user.tier.status()["donors"][0]["name"] != door.stem
    assert owner("status")["bytes"] == 2 << 20


def test_auto_lends_itself_no_more_than_the_limit_on_open_files_allows(
    start_tier: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("resource.getrlimit", lambda _: (260, 260))  # 256 without extents
    user = start_tier()
    (donor,) = user.tier.status()["donors"]
    assert (donor["extents_total"], donor["extent_bytes"]) == (4, 1 << 20)
    assert "4 MiB of host memory, as many extents of 1 MiB as the limit on open" in caplog.text


def test_why_an_owned_donor_does_not_start_is_said_once(
    start_tier: Any, one_line: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    line = one_line(lambda: start_tier("host=100TiB"))
    assert "did not start: size 100 TiB is over what device host has to give" in line
    assert "100 TiB" not in caplog.text


def own_donors() -> list[psutil.Process]:
    """Donor processes that this process owns, those that are being started included."""
    return donors_started_with("--owner-pid", str(os.getpid()))


def test_an_owned_donor_that_is_killed_is_lost_and_started_again(
    start_tier: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    user = start_tier("host=2MiB")
    ids = user.take_all()
    user.write(ids, 8)
    (donor,) = user.tier.status()["donors"]
    os.kill(donor["pid"], signal.SIGKILL)
    user.poll_for(lambda: user.tier.must_vacate().size == 16, "the loss is noticed")
    # Joined as new beside what is left of the first, under its name and of its size.
    user.poll_for(lambda: user.tier.free_blocks == 16, "it is started again and joined")
    assert list(user.tier.donor_names().values()) == [donor["name"]] * 2
    assert user.holds(ids, 8)
    new = user.take_all()
    assert user.holds(new, 0)
    user.tier.free(ids)
    user.poll_for(lambda: len(user.tier.donor_names()) == 1, "the first is forgotten")
    (again,) = user.tier.status()["donors"]
    assert again["pid"] != donor["pid"]
    assert (again["extents_total"], again["extent_bytes"]) == (2, 1 << 20)
    user.write(new, 9)
    assert user.holds(new, 9)
    lines = [message for message in caplog.messages if message.startswith("own donor")]
    what = f"own donor {donor['name']} of 2 MiB on host"
    assert lines == [f"{what} has ended by itself", f"{what} was started again"]
    assert len(own_donors()) == 1
    user.tier.close()
    assert own_donors() == []


def test_an_owned_donor_is_started_again_as_often_as_it_takes(
    start_tier: Any, settings: Any, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    hasty = replace(settings, owned_restart_s=0.05, owned_restart_max_s=0.2)
    user = start_tier("host=1MiB", settings=hasty)
    (donor,) = user.tier.status()["donors"]
    monkeypatch.setenv("SWIFTCACHE_SPELT_WRONG", "1")  # refused by every donor that is started
    os.kill(donor["pid"], signal.SIGKILL)
    warnings = f"own donor {donor['name']} of 1 MiB on host did not start: environment variable "

    def waits() -> list[str]:
        lines = [message for message in caplog.messages if message.startswith(warnings)]
        return [line.partition("; tried again in ")[2] for line in lines]

    user.poll_for(lambda: len(waits()) >= 3, "it fails three times")
    assert waits()[:3] == ["0.1 s", "0.2 s", "0.2 s"]
    refused = [message for message in caplog.messages if "SPELT_WRONG" in message]
    assert all(message.startswith(warnings) for message in refused), "one line each"
    monkeypatch.delenv("SWIFTCACHE_SPELT_WRONG")
    user.poll_for(lambda: user.tier.free_blocks == 8, "it is joined again")


@pytest.mark.parametrize("restart_s", [60.0, 0.01])
def test_no_owned_donor_is_left_of_a_receiver_that_ends_before_it_is_started_again(
    start_tier: Any, settings: Any, wait_for: Any, runtime_dir: Any, restart_s: float
) -> None:
    """Before that has begun, and while it is under way."""
    user = start_tier("host=1MiB", settings=replace(settings, owned_restart_s=restart_s))
    (donor,) = own_donors()
    donor.kill()
    wait_for(lambda: donor not in own_donors(), "it has ended")
    if restart_s < 1:
        wait_for(own_donors, "another is being started")
    user.tier.close()
    assert own_donors() == []
    assert list(runtime_dir.iterdir()) == []


def test_an_owner_that_is_killed_while_its_donor_is_started_again_leaves_none(
    start_receiver: Any, settings: Any, wait_for: Any, runtime_dir: Any
) -> None:
    receiver = start_receiver("first", "host=1MiB")
    (donor,) = receiver("status")["donors"]
    os.kill(donor["pid"], signal.SIGKILL)
    owner = ["--owner-pid", str(receiver.process.pid)]
    wait_for(
        lambda: {p.pid for p in donors_started_with(*owner)} - {donor["pid"]},
        "another is being started",
    )
    receiver.end()  # waits for its donors
    wait_for(lambda: not any(runtime_dir.iterdir()), "its sockets are removed")
