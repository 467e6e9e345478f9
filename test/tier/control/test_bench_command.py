"""`swiftcache bench`, as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from tier.control.conftest import DonorProcess, wait_for

from swiftcache_tier.lease import LeaseState


def all_free(donor: DonorProcess) -> bool:
    return donor.extents(LeaseState.FREE) == 4


def test_every_donor_is_measured_and_gets_all_its_memory_back(
    swiftcache: Any, start_donor: Callable[..., DonorProcess]
) -> None:
    donors = [start_donor(name, "4MiB", "--extent-size", "1MiB") for name in ("ada", "bob")]
    report = json.loads(swiftcache("bench", "--json", "--size", "2MiB").stdout)
    assert [row["name"] for row in report["donors"]] == ["ada", "bob"]
    for row in report["donors"]:
        assert row["bytes"] == 4 << 20
        assert row["read_gb_per_s"] > 0
        assert row["write_gb_per_s"] > 0
    assert report["join_ms"] > 0
    for donor in donors:
        wait_for(partial(all_free, donor), "all is free again")
    text = swiftcache("bench", "--size", "1MiB").stdout
    assert "WRITE GB/s" in text
    assert "given back in" in text


def test_donors_that_do_not_lend_are_left_out(
    swiftcache: Any, start_donor: Callable[..., DonorProcess]
) -> None:
    start_donor("ada")
    killed = start_donor("bob")
    killed.process.kill()
    killed.process.wait()
    ended = swiftcache("bench", "--json", "--size", "1MiB")
    assert ended.returncode == 0
    assert [row["name"] for row in json.loads(ended.stdout)["donors"]] == ["ada"]
    assert "left out: bob is stale" in ended.stderr


def test_a_size_of_less_than_a_block_is_refused(swiftcache: Any) -> None:
    for size in ("0", "1023KiB"):
        ended = swiftcache("bench", "--size", size)
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert "is less than one block: expected 1 MiB or more" in line


def test_without_a_donor_it_says_how_to_start_one(swiftcache: Any) -> None:
    ended = swiftcache("bench")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "swiftcache donor --device host" in line
