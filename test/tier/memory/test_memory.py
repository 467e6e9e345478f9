"""How much host memory may be promised, from what the kernel says of control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from swiftcache_tier.memory import available_host_bytes, cgroup_headroom_bytes

GIB = 2**30


class Machine:
    """A made-up /proc/self and /sys/fs/cgroup below a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc_self = folder / "self"
        self.proc_self.mkdir()
        self.mount_v1 = folder / "cgroup" / "memory"
        self.mount_v2 = folder / "cgroup" / "unified"

    def process_in(self, *lines: str) -> None:
        (self.proc_self / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mounts(self, *, root_v1: str | None = None, root_v2: str | None = None) -> None:
        lines = ["22 1 0:20 / /proc rw,relatime shared:12 - proc proc rw"]
        if root_v1 is not None:
            lines += [
                f"31 28 0:26 {root_v1} {self.mount_v1.parent}/cpu rw - cgroup cgroup rw,cpu",
                f"35 28 0:32 {root_v1} {self.mount_v1} rw - cgroup cgroup rw,memory",
            ]
        if root_v2 is not None:
            lines.append(f"41 28 0:38 {root_v2} {self.mount_v2} rw shared:9 - cgroup2 none rw")
        (self.proc_self / "mountinfo").write_text("".join(f"{line}\n" for line in lines))

    def group(self, folder: Path, **files: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_version_2_leaves_the_limit_less_what_cannot_be_dropped(machine: Machine) -> None:
    machine.process_in("0::/user/serving")
    machine.mounts(root_v2="/")
    machine.group(
        machine.mount_v2 / "user" / "serving",
        memory__max=10 * GIB,
        memory__high="max",
        memory__current=7 * GIB,
        memory__stat=f"anon {4 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}",
    )
    assert cgroup_headroom_bytes(machine.proc_self) == 5 * GIB


def test_the_tightest_of_the_groups_above_counts(machine: Machine) -> None:
    machine.process_in("0::/a/b")
    machine.mounts(root_v2="/")
    machine.group(machine.mount_v2 / "a" / "b", memory__max=10 * GIB, memory__current=GIB)
    machine.group(machine.mount_v2 / "a", memory__max=8 * GIB, memory__current=6 * GIB)
    machine.group(machine.mount_v2, memory__stat="anon 5")
    assert cgroup_headroom_bytes(machine.proc_self) == 2 * GIB


def test_a_limit_that_throttles_counts(machine: Machine) -> None:
    machine.process_in("0::/a")
    machine.mounts(root_v2="/")
    machine.group(
        machine.mount_v2 / "a", memory__max="max", memory__high=4 * GIB, memory__current=GIB
    )
    assert cgroup_headroom_bytes(machine.proc_self) == 3 * GIB


def test_over_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.process_in("0::/a")
    machine.mounts(root_v2="/")
    machine.group(machine.mount_v2 / "a", memory__high=GIB, memory__current=2 * GIB)
    assert cgroup_headroom_bytes(machine.proc_self) == 0


def test_version_1_reads_the_memory_controller_only(machine: Machine) -> None:
    machine.process_in("5:cpu:/busy", "4:memory:/box", "0::/")
    machine.mounts(root_v1="/", root_v2="/")
    machine.group(
        machine.mount_v1 / "box",
        memory__limit_in_bytes=6 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"inactive_file 0\ntotal_inactive_file {GIB}",
    )
    machine.group(machine.mount_v1.parent / "cpu" / "box", cpu__shares=1024)
    assert cgroup_headroom_bytes(machine.proc_self) == 4 * GIB


@pytest.mark.parametrize("root", ["/docker/f00d", "/elsewhere"])
def test_a_mount_that_starts_at_the_containers_group(machine: Machine, root: str) -> None:
    machine.process_in("4:memory:/docker/f00d")
    machine.mounts(root_v1=root)
    machine.group(machine.mount_v1, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB // 2)
    assert cgroup_headroom_bytes(machine.proc_self) == 3 * GIB // 2


def test_no_limit_anywhere(machine: Machine) -> None:
    machine.process_in("4:memory:/box", "0::/a")
    machine.mounts(root_v1="/", root_v2="/")
    machine.group(
        machine.mount_v1 / "box",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=GIB,
    )
    machine.group(machine.mount_v2 / "a", memory__max="max", memory__current=GIB)
    assert cgroup_headroom_bytes(machine.proc_self) is None


def test_no_control_groups_at_all(machine: Machine) -> None:
    assert cgroup_headroom_bytes(machine.proc_self) is None


def test_what_is_available_here_is_something_and_not_more_than_there_is() -> None:
    assert 0 < available_host_bytes() <= psutil.virtual_memory().total
