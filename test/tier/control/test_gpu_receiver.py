"""A receiver on a GPU, donors on others: real processes, a driver that is made up."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from support.fake_cuda import GRANULARITY, FakeDriver
from support.fake_nvml import FakeGpu, FakeNvml, gpu_uuid
from support.processes import wait_until
from support.raw_memory import peek, poke
from swiftcache_tier import topology
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import cuda
from swiftcache_tier.receiver import check_specs, control_thread, reach
from swiftcache_tier.receiver.probe import Answer, Question, probe
from swiftcache_tier.spec import parse_specs

FAKE_GPUS = Path(__file__).with_name("fake_gpus")
TESTS = Path(__file__).parents[2]
LINKS = 18
BLOCK = 1 << 17


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver of two GPUs, in this process and in all that it starts."""
    fake = FakeDriver(memory_bytes=64 << 20, folder=tmp_path)
    fake.install(monkeypatch)
    pair = FakeGpu(0, link_ends=[1] * LINKS), FakeGpu(1, link_ends=[0] * LINKS)
    nvml = FakeNvml(*pair, p2p=frozenset({"READ", "WRITE", "NVLINK"}))
    for module in (topology, reach, cuda):
        monkeypatch.setattr(module, "load_nvml", lambda: nvml)
    search_path = filter(None, [str(FAKE_GPUS), str(TESTS), os.environ.get("PYTHONPATH")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search_path))
    monkeypatch.setenv("FAKE_GPUS", "2")
    monkeypatch.setenv("FAKE_GPU_MEMORY", str(tmp_path))
    yield fake
    assert not fake.mappings
    assert not fake.registered
    assert not fake.reservations
    assert not fake.buffers
    assert fake.contexts == [0, 0]


@pytest.fixture
def start_gpu_donor(driver: FakeDriver, start_donor: Any) -> Callable[..., Any]:
    def start(name: str = "gpu", size: str = "8MiB", *flags: str) -> Any:
        return start_donor(name, size, "--device", "cuda:1", "--extent-size", "2MiB", *flags)

    return start


@pytest.fixture
def start_gpu_tier(driver: FakeDriver, start_tier: Any) -> Iterator[Callable[..., Any]]:
    users: list[Any] = []

    def start(*specs: str, **how: Any) -> Any:
        users.append(start_tier(*specs, device="cuda:0", **how))
        return users[-1]

    yield start
    for user in users:
        user.tier.close()


class Memory:
    """Blocks of a tier as its GPU sees them."""

    def __init__(self, driver: FakeDriver, tier: Any) -> None:
        self._driver = driver
        self._tier = tier

    def write(self, ids: np.ndarray) -> None:
        """To each byte of a block a value that tells the block."""
        for block, address in zip(ids.tolist(), self._tier.addresses(ids).tolist(), strict=True):
            self._put(address, bytes([block % 251 + 1]) * BLOCK)

    def holds(self, ids: np.ndarray, zeros: bool = False) -> bool:
        return all(
            self._get(address) == bytes([0 if zeros else block % 251 + 1]) * BLOCK
            for block, address in zip(ids.tolist(), self._tier.addresses(ids).tolist(), strict=True)
        )

    def _put(self, address: int, data: bytes) -> None:
        poke(address, data) if self._is_host(address) else self._driver.write(address, data)

    def _get(self, address: int) -> bytes:
        return peek(address, BLOCK) if self._is_host(address) else self._driver.read(address, BLOCK)

    def _is_host(self, address: int) -> bool:
        """Host memory, which must be locked for the GPU to see it."""
        return any(at <= address < at + size for at, size in self._driver.registered.items())


def test_memory_of_gpus_and_of_the_host_in_one_pool(
    driver: FakeDriver, start_gpu_donor: Any, start_donor: Any, start_gpu_tier: Any
) -> None:
    gpu, host = start_gpu_donor(), start_donor("host", "4MiB")
    assert "cuda:1 (GPU 1, GPU-00000000), 8 MiB in 4 extents of 2 MiB" in gpu.ready_line
    user = start_gpu_tier(host.spec, gpu.spec)
    tier = user.tier
    user.poll_for(lambda: tier.total_blocks == 96, "both donors lend all they have")
    memory = Memory(driver, tier)
    first = tier.alloc(64)
    names = tier.donor_names()
    assert {names[key] for key in tier.donor_of(first)} == {"gpu"}, "NVLink is filled first"
    rest = tier.alloc(32)
    assert {names[key] for key in tier.donor_of(rest)} == {"host"}
    ids = np.concatenate([first, rest])
    assert memory.holds(ids, zeros=True)
    memory.write(ids)
    assert memory.holds(ids)
    assert np.array_equal(tier.addresses(ids), tier.base_address + ids * BLOCK)
    assert len(np.unique(ids)) == 96
    tier.check()
    assert tier.in_gpu_memory(first)
    assert not tier.in_gpu_memory(ids)
    assert not tier.in_gpu_memory(rest)


def test_status_tells_what_lies_between(
    start_gpu_donor: Any, start_donor: Any, start_gpu_tier: Any, wait_for: Any, swiftcache: Any
) -> None:
    gpu, host = start_gpu_donor(), start_donor("host", "1MiB")
    user = start_gpu_tier(gpu.spec, host.spec)
    user.tier.poll()
    status = user.tier.status()
    assert status["device"] == "cuda:0"
    by_name = {donor["name"]: donor for donor in status["donors"]}
    assert by_name["gpu"]["device_uuid"] == gpu_uuid(1)
    assert by_name["gpu"]["link"] == "nvlink"
    assert by_name["gpu"]["link_details"]["nvlinks"] == LINKS
    assert by_name["gpu"]["link_details"]["expected_gb_per_s"] > 300
    # A copy of 1 GB takes a second on these GPUs.
    assert by_name["gpu"]["link_details"]["measured_gb_per_s"] == 1.0
    assert by_name["host"]["device_uuid"] is None
    assert by_name["host"]["link"] == "host"
    wait_for(lambda: gpu.status().receivers[0].gb_per_s, "the donor is told what was measured")
    reply = gpu.status()
    assert (reply.device_uuid, reply.device_model) == (gpu_uuid(1), "GPU 1")
    assert reply.receivers[0].link.startswith(f"nvlink x{LINKS}")
    table = swiftcache("status").stdout
    assert "cuda:1 (GPU 1, GPU-00000000)" in table
    assert f"nvlink x{LINKS}, PCIe 5 x16, 1 GB/s" in table


def test_bandwidth_that_cannot_be_measured_is_taken_as_expected(
    driver: FakeDriver, start_gpu_donor: Any, start_gpu_tier: Any
) -> None:
    donor = start_gpu_donor()
    with driver.fail("cuMemAlloc", cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
        user = start_gpu_tier(donor.spec)
    (seen,) = user.tier.status()["donors"]
    assert seen["link_details"]["measured_gb_per_s"] is None
    assert user.tier.alloc(64) is not None


def test_the_first_lend_does_not_wait_for_the_link_to_be_measured(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_gpu_tier: Any,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def measure(*_: Any) -> float:
        seen.append(len(driver.mappings))
        return 1.0

    monkeypatch.setattr(reach.Reach, "measure", measure)
    donor = start_gpu_donor("gpu", "8MiB")
    calm = replace(settings, heartbeat_s=30.0, lost_after_s=60.0, mapping_slice_s=1e-9)
    start_gpu_tier(donor.spec, settings=calm)
    assert seen == [4], "all that the donor lends is mapped, extent by extent, before"


def test_the_link_is_measured_though_the_donor_cannot_give_all(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_gpu_tier: Any,
    settings: Any,
    wait_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    donor = start_gpu_donor()
    map_at = cu.cuMemMap

    def two_and_no_more(*arguments: Any) -> Any:
        if len(driver.mappings) == 2:
            return (cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return map_at(*arguments)

    two_and_no_more.__name__ = "cuMemMap"
    monkeypatch.setattr(cu, "cuMemMap", two_and_no_more)
    user = start_gpu_tier(donor.spec, settings=replace(settings, join_timeout_s=0.5))
    assert len(driver.mappings) == 2
    wait_for(lambda: donor.status().receivers[0].gb_per_s, "the donor is told what was measured")
    user.tier.poll()
    assert user.tier.status()["donors"][0]["link_details"]["measured_gb_per_s"] == 1.0


def test_gpu_memory_outlives_a_donor_that_is_killed(
    driver: FakeDriver, start_gpu_donor: Any, start_donor: Any, start_gpu_tier: Any
) -> None:
    gpu, host = start_gpu_donor(), start_donor("host", "2MiB")
    user = start_gpu_tier(gpu.spec, host.spec)
    memory = Memory(driver, user.tier)
    ids = user.take_all()
    memory.write(ids)
    gpu.signal(signal.SIGKILL)
    user.poll_for(lambda: user.tier.must_vacate().size == 64, "the loss is noticed")
    assert memory.holds(ids)
    doomed = user.tier.must_vacate()
    user.tier.free(doomed)
    user.poll_for(lambda: list(user.tier.donor_names().values()) == ["host"], "it is forgotten")
    wait_until(lambda: not driver.mappings, 60, "its memory is unmapped", 0.01)
    assert memory.holds(np.setdiff1d(ids, doomed))


def test_a_gpu_donor_that_ends_gets_its_memory_back(
    driver: FakeDriver, start_gpu_donor: Any, start_gpu_tier: Any, start_donor: Any
) -> None:
    gpu, host = start_gpu_donor(), start_donor("host", "1MiB")
    user = start_gpu_tier(gpu.spec, host.spec)
    memory = Memory(driver, user.tier)
    ids = user.take_all()
    memory.write(ids)
    gpu.signal(signal.SIGTERM)
    user.poll_for(lambda: user.tier.must_vacate().size == 64, "the donor asks it back")
    assert memory.holds(ids)
    user.tier.free(user.tier.must_vacate())
    user.poll_for(lambda: gpu.process.poll() is not None, "the donor ends")
    assert gpu.wait() == 0
    assert "0 extents (0 B) are still with receivers" in gpu.log()
    assert user.tier.status()["reclaims"]["in_time"] == 1


def test_memory_that_cannot_be_unmapped_yet_is_not_given_back(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_gpu_tier: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = start_gpu_donor()
    user = start_gpu_tier(donor.spec)
    with driver.fail("cuMemUnmap", cu.CUresult.CUDA_ERROR_UNKNOWN):
        donor.signal(signal.SIGTERM)
        user.poll_for(lambda: user.tier.total_blocks == 0, "all is to be given back")
        user.poll_for(lambda: "cannot be unmapped yet" in caplog.text, "it is tried")
        assert donor.extents("reclaiming") == 4
    user.poll_for(lambda: donor.process.poll() is not None, "it is tried again")
    assert donor.wait() == 0


def test_a_tier_ends_though_its_gpu_has_failed(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_gpu_tier: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = start_gpu_donor()
    user = start_gpu_tier(donor.spec)
    broken = cu.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with driver.fail("cuMemUnmap", broken):
        user.tier.close()
    assert "donor memory stays mapped until this process ends" in caplog.text
    assert donor.extents("free") == 0, "it is not lent to others meanwhile"
    driver.mappings.clear()
    driver.reservations.clear()
    driver.contexts[0] = 0


def test_memory_that_cannot_be_mapped(
    driver: FakeDriver, start_gpu_donor: Any, start_gpu_tier: Any, one_line: Any, settings: Any
) -> None:
    donor = start_gpu_donor()
    hasty = replace(settings, join_timeout_s=0.5)
    with driver.fail("cuMemSetAccess", cu.CUresult.CUDA_ERROR_NOT_PERMITTED):
        line = one_line(lambda: start_gpu_tier(donor.spec, settings=hasty))
    assert "cannot be mapped: " in line
    assert "NOT_PERMITTED" in line


def test_the_next_owner_of_gpu_memory_reads_zeros(
    driver: FakeDriver, start_gpu_donor: Any, start_gpu_tier: Any
) -> None:
    donor = start_gpu_donor()
    for _ in range(2):
        user = start_gpu_tier(donor.spec)
        memory = Memory(driver, user.tier)
        ids = user.take_all()
        assert memory.holds(ids, zeros=True)
        memory.write(ids)
        user.tier.close()


def test_owned_donors_on_a_gpu_and_on_the_host(driver: FakeDriver, start_gpu_tier: Any) -> None:
    user = start_gpu_tier("cuda:1=5MiB", "host=1MiB")
    extents = {d["device"]: (d["extents"]["lent"], d["extent_bytes"]) for d in status_of(user)}
    # Of the GPU's memory in its pages of 2 MiB, though the setting says 1 MiB.
    assert extents == {"cuda:1": (2, GRANULARITY), "host": (1, 1 << 20)}
    ids = user.take_all()
    memory = Memory(driver, user.tier)
    memory.write(ids)
    assert memory.holds(ids)


def status_of(user: Any) -> list[dict[str, Any]]:
    donors: list[dict[str, Any]] = user.tier.status()["donors"]
    return donors


def test_a_gpu_that_the_receiver_does_not_see(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_donor: Any,
    start_gpu_tier: Any,
    one_line: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    donor = start_gpu_donor()
    start_donor("host", "1MiB")
    driver.devices = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = one_line(lambda: start_gpu_tier(donor.spec))
    assert f"{gpu_uuid(1)} is not seen by this process" in line
    assert "CUDA_VISIBLE_DEVICES, here 0" in line
    # `auto` takes what can be taken.
    assert [d["name"] for d in status_of(start_gpu_tier())] == ["host"]


def test_a_gpu_out_of_reach(
    driver: FakeDriver,
    start_gpu_donor: Any,
    start_gpu_tier: Any,
    one_line: Any,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    donor = start_gpu_donor()
    driver.peer_access = False
    line = one_line(lambda: start_gpu_tier(donor.spec))
    assert "no peer access" in line
    assert "host memory" in line
    with caplog.at_level(logging.INFO):
        user = start_gpu_tier(settings=replace(settings, auto_pinned_bytes_max=2 << 20))
    (seen,) = status_of(user)
    assert (seen["device"], seen["bytes"]) == ("host", 2 << 20)
    assert "starting one of 2 MiB of host memory, the most that is locked" in caplog.text


def test_a_receiver_on_a_cpu_takes_no_gpu_memory(
    start_gpu_donor: Any, start_tier: Any, one_line: Any
) -> None:
    donor = start_gpu_donor()
    for spec in (donor.spec, "cuda:1=4MiB"):
        line = one_line(lambda spec=spec: start_tier(spec))
        assert "cuda:1 cannot be mapped by a receiver on cpu" in line


def test_a_device_that_is_not_there(start_gpu_tier: Any, start_tier: Any) -> None:
    for device in ("cuda:7", "tpu:0", "cuda"):
        with pytest.raises(SwiftCacheError, match=device):
            start_tier("host=1MiB", device=device)


def test_extents_that_a_gpu_cannot_map(
    driver: FakeDriver, start_donor: Any, one_line: Any, swiftcache: Any
) -> None:
    done = swiftcache("donor", "--device", "cuda:1", "--size", "8MiB", "--extent-size", "1MiB")
    assert done.returncode == 2
    assert "multiple of 2097152" in done.stderr
    done = swiftcache("donor", "--device", "cuda:5", "--size", "8MiB")
    assert "'cuda:5' cannot be used: this process sees cuda:0 to cuda:1" in done.stderr


def test_slow_mapping_keeps_nobody_waiting(
    driver: FakeDriver,
    start_donor: Any,
    start_gpu_tier: Any,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of it takes longer than a donor waits for a sign of life, and than a start waits."""
    register = cu.cuMemHostRegister

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.15)
        return register(*arguments)

    monkeypatch.setattr(cu, "cuMemHostRegister", slowly)
    hasty = replace(settings, lost_after_s=2.0, join_timeout_s=2.0, extents_per_message=24)
    large, other = (start_donor(*what, settings=hasty) for what in (("a", "24MiB"), ("b", "1MiB")))
    user = start_gpu_tier(large.spec, other.spec, settings=hasty)
    assert user.tier.total_blocks == 200
    for donor in (large, other):
        assert "silent" not in donor.log()
        assert donor.extents("lent") == (24 if donor is large else 1)


def test_the_control_thread_runs_near_the_gpu(
    start_gpu_tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = topology.Gpu(gpu_uuid(0), "GPU 0", "0000:10:00.0", numa_node=1, pcie=None)
    monkeypatch.setattr(reach, "find_gpu", lambda *_: here)
    pinned: dict[str, int | None] = {}

    def pin(node: int | None) -> bool:
        pinned[threading.current_thread().name] = node
        return True

    monkeypatch.setattr(control_thread, "pin_thread_to_numa_node", pin)
    start_gpu_tier("host=1MiB")
    assert pinned == {"swiftcache-control": 1}


def test_blocks_are_placed_by_what_was_measured(
    start_gpu_donor: Any, start_gpu_tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = start_gpu_donor("near"), start_gpu_donor("far")
    measured = iter([30.0, 10.0])
    monkeypatch.setattr(reach.Reach, "measure", lambda *_: next(measured))
    user = start_gpu_tier(near.spec, far.spec)
    rates = {d["name"]: d["link_details"]["measured_gb_per_s"] for d in status_of(user)}
    assert sorted(rates.values()) == [10.0, 30.0]
    names = [user.tier.donor_names()[key] for key in user.tier.donor_of(user.tier.alloc(32))]
    assert {name: names.count(name) for name in rates} == {
        name: 24 if rate == 30.0 else 8 for name, rate in rates.items()
    }


@pytest.fixture
def complaint(driver: FakeDriver, runtime_dir: Path, settings: Any, one_line: Any) -> Any:
    """The line about SPECs that are wrong for a receiver on cuda:0."""

    def complain(*specs: str, settings: Any = settings) -> str:
        line: str = one_line(
            lambda: check_specs(parse_specs(specs), runtime_dir, settings, "cuda:0")
        )
        return line

    return complain


def test_specs_are_checked_without_the_driver_in_this_process(
    driver: FakeDriver, start_gpu_donor: Any, runtime_dir: Path, settings: Any, complaint: Any
) -> None:
    donor = start_gpu_donor()
    specs = parse_specs(["cuda:1=40MiB", "host=1MiB", donor.spec])
    check_specs(specs, runtime_dir, settings, "cuda:0")
    line = complaint("host=1MiB", "cuda:1=100GiB")
    assert "donor SPEC cuda:1=100GiB: that is over what cuda:1 has to give: 6 GiB" in line
    assert "donor SPEC cuda:7=1GiB: device 'cuda:7'" in complaint("cuda:7=1GiB")
    assert not driver.calls


def test_which_gpu_is_meant_is_asked_without_the_driver_in_this_process(
    driver: FakeDriver, settings: Any
) -> None:
    questions = [Question("cuda:1", None), Question("cuda:7", None)]
    found, missing = probe("cuda:0", questions, settings)
    assert found == Answer(None, 6 << 30, gpu_uuid(1))
    assert "device 'cuda:7'" in str(missing.problem)
    assert not driver.calls


def test_a_check_of_specs_names_gpus_that_are_hidden(
    start_gpu_donor: Any, complaint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor = start_gpu_donor()
    monkeypatch.setenv("FAKE_GPUS", "1")
    line = complaint(donor.spec)
    assert line.startswith(f"donor SPEC {donor.spec}: its GPU {gpu_uuid(1)}")
    assert "CUDA_VISIBLE_DEVICES" in line


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo driver is broken >&2; exit 3", ["ended with status 3", "(driver is broken)"]),
        ("echo gibberish", ["cannot be asked"]),
        ("exec sleep 60", ["has not answered for 0.3 s"]),
    ],
)
def test_a_driver_that_gives_no_answer(
    complaint: Any,
    settings: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    words: list[str],
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    line = complaint("cuda:1=2MiB", settings=replace(settings, probe_timeout_s=0.3))
    for word in [*words, "use host memory"]:
        assert word in line
