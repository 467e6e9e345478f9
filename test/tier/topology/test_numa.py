"""Nodes of made-up machines, and the calling thread's CPUs."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.raw_memory import DEADLINE_S
from swiftcache_tier.extents import HostAddressRange, HostArena
from swiftcache_tier.topology import numa_nodes, pin_thread_to_numa_node, prefer_numa_node


def machine(root: Path, cpus_of_node: dict[int, str]) -> Path:
    """The kernel's files about a machine with these nodes."""
    nodes = root / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "has_cpu").write_text(",".join(map(str, cpus_of_node)) + "\n")
    for node, cpus in cpus_of_node.items():
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}/cpulist").write_text(cpus + "\n")
    return root


def test_nodes(tmp_path: Path) -> None:
    (tmp_path / "devices/system/node").mkdir(parents=True)
    assert numa_nodes(tmp_path) == []
    for text, nodes in (("0", [0]), ("0-1", [0, 1]), ("0-2,8", [0, 1, 2, 8]), ("", [])):
        (tmp_path / "devices/system/node/has_cpu").write_text(text + "\n")
        assert numa_nodes(tmp_path) == nodes


def test_a_thread_is_kept_on_the_cpus_of_a_node(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    sysfs = machine(tmp_path, {0: f"{mine[0]}", 1: "9000-9003"})
    # In a process of its own: what is pinned here would stay so for the tests that follow.
    script = (
        "import os, sys, threading\n"
        "from pathlib import Path\n"
        "from swiftcache_tier.topology import pin_thread_to_numa_node\n"
        "pinned = []\n"
        "def work():\n"
        "    pinned.append(pin_thread_to_numa_node(0, Path(sys.argv[1])))\n"
        "    pinned.append(sorted(os.sched_getaffinity(0)))\n"
        "before = os.sched_getaffinity(0)\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "assert os.sched_getaffinity(0) == before\n"
        "print(pinned)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(sysfs)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    ).stdout
    assert output.strip() == f"[True, [{mine[0]}]]"


@pytest.mark.parametrize(
    ("cpus_of_node", "node"),
    [
        ({0: "0-9999"}, 0),  # no other node
        ({0: "0-9999", 1: "10000"}, 1),  # none of its CPUs may be used
        ({0: "0-9999", 1: "10000"}, 2),  # no such node
        ({0: "0-9999", 1: "10000"}, None),
        ({}, 0),
    ],
)
def test_a_thread_that_stays_where_it_is(
    tmp_path: Path, cpus_of_node: dict[int, str], node: int | None
) -> None:
    before = os.sched_getaffinity(0)
    assert not pin_thread_to_numa_node(node, machine(tmp_path, cpus_of_node))
    assert os.sched_getaffinity(0) == before


def test_memory_is_asked_of_a_node(tmp_path: Path) -> None:
    """The kernel shows a mapping's policy, and refuses a node that it does not have."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel does not show where memory is asked for")
    sysfs = machine(tmp_path, {0: "0", 1: "1"})
    size_bytes = 4 * mmap.PAGESIZE
    addresses = HostAddressRange(size_bytes)
    extent = HostArena().create(size_bytes)
    descriptor = extent.share()
    addresses.map(0, descriptor, size_bytes)
    try:
        prefer_numa_node(addresses.base, size_bytes, 0, sysfs)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"a sandbox or the kernel has no such call: {error}")
    try:
        assert policy_at(addresses.base) == "prefer:0"
        with pytest.raises(OSError, match="mbind"):
            prefer_numa_node(addresses.base, size_bytes, 999, sysfs)
    finally:
        os.close(descriptor)
        extent.close()
        addresses.close()


def test_memory_is_asked_of_no_node_where_there_is_one(tmp_path: Path) -> None:
    prefer_numa_node(0, mmap.PAGESIZE, 5, machine(tmp_path, {0: "0"}))


def policy_at(address: int) -> str:
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        start, policy = line.split()[:2]
        if int(start, 16) == address:
            return policy
    raise AssertionError(f"no mapping starts at {address:#x}")
