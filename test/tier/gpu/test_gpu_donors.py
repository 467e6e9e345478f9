"""`swiftcache donor --device cuda:N` and a receiver on cuda:0, as they are used."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.gpu_memory import GpuView
from support.processes import wait_until
from support.raw_memory import DEADLINE_S, peek, run_child
from swiftcache_tier.control.query import query_status
from swiftcache_tier.control.runtime_dir import donor_paths
from swiftcache_tier.cuda_driver import device_count, device_uuid
from swiftcache_tier.receiver import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import parse_specs
from swiftcache_tier.topology import free_memory_bytes, load_nvml

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() == 0, reason="needs a CUDA GPU"),
]

BLOCK = 9 << 18  # 2.25 MiB: blocks straddle the edges of extents
PIECE = 1 << 18
SETTINGS = Settings(heartbeat_s=0.2, discovery_interval_s=0.2, reclaim_deadline_s=30.0)


class Donor:
    """A donor process; its log goes to this process's stderr."""

    def __init__(self, runtime_dir: Path, name: str, device: str, size: str) -> None:
        self.paths = donor_paths(runtime_dir, name)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "swiftcache_tier", "donor", "--device", device),
                *("--size", size, "--name", name, "--runtime-dir", str(runtime_dir)),
            ],
            env=os.environ | SETTINGS.as_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        start_s = time.monotonic()
        self.ready_line = self.process.stdout.readline().decode()
        print(f"{self.ready_line.strip()} after {time.monotonic() - start_s:.2f} s")
        assert self.ready_line

    @property
    def spec(self) -> str:
        return self.paths.spec

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


class User:
    """A tier on cuda:0, and what is in its blocks."""

    def __init__(self, tier: DonorTier, view: GpuView) -> None:
        self.tier = tier
        self._view = view

    def take_all(self) -> np.ndarray:
        ids = self.tier.alloc(self.tier.free_blocks)
        assert ids is not None
        return ids

    def write(self, ids: np.ndarray) -> None:
        for block, address in self._pieces(ids):
            self._view.fill(address, block % 2**31, PIECE)

    def holds(self, ids: np.ndarray, zeros: bool = False) -> bool:
        return all(
            self._view.read(address, PIECE)
            == (0 if zeros else block % 2**31).to_bytes(4, "little") * (PIECE // 4)
            for block, address in self._pieces(ids)
        )

    def _pieces(self, ids: np.ndarray) -> Iterator[tuple[int, int]]:
        """Each block and the addresses of its pieces, none of which crosses an extent's edge."""
        for block, address in zip(ids.tolist(), self.tier.addresses(ids).tolist(), strict=True):
            for offset in range(0, BLOCK, PIECE):
                yield block, address + offset

    def on(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Those of `ids` that lie on that donor."""
        keys = [key for key, donor in self.tier.donor_names().items() if donor == name]
        return ids[np.isin(self.tier.donor_of(ids), keys)]

    def poll_for(self, condition: Callable[[], Any], what: str) -> None:
        def polled() -> Any:
            self.tier.poll()
            self.tier.check()
            return condition()

        wait_until(polled, DEADLINE_S, what, 0.01)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    # Paths of sockets are limited to 107 bytes, and pytest's folders are long.
    folder = Path(tempfile.mkdtemp(prefix="sc-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_donor(runtime_dir: Path) -> Iterator[Callable[..., Donor]]:
    donors: list[Donor] = []

    def start(name: str, device: str, size: str) -> Donor:
        donors.append(Donor(runtime_dir, name, device, size))
        return donors[-1]

    yield start
    for donor in donors:
        donor.end()


@pytest.fixture
def start_user(runtime_dir: Path, view: GpuView) -> Iterator[Callable[..., User]]:
    tiers: list[DonorTier] = []

    def start(*specs: str) -> User:
        tier = DonorTier(
            parse_specs(specs),
            BLOCK,
            settings=SETTINGS,
            runtime_dir=runtime_dir,
            receiver_name="test",
            device="cuda:0",
        )
        tiers.append(tier)
        start_s = time.monotonic()
        tier.start()
        size = format_size(tier.status()["bytes"])
        print(f"{size} from {tier.donor_names()} after {time.monotonic() - start_s:.2f} s")
        return User(tier, view)

    yield start
    for tier in tiers:
        tier.close()


def test_what_is_written_is_read_back_and_the_next_owner_reads_zeros(
    start_donor: Any, start_user: Any, donor_ordinal: int
) -> None:
    donor = start_donor("gpu", f"cuda:{donor_ordinal}", "256MiB")
    for _ in range(2):
        user = start_user(donor.spec)
        ids = user.take_all()
        assert len(ids) == (256 << 20) // BLOCK
        assert user.holds(ids, zeros=True)
        user.write(ids)
        assert user.holds(ids)
        user.tier.close()


def test_host_and_gpu_memory_in_one_pool(
    start_donor: Any, start_user: Any, donor_ordinal: int
) -> None:
    gpu = start_donor("gpu", f"cuda:{donor_ordinal}", "128MiB")
    host = start_donor("host", "host", "128MiB")
    user = start_user(host.spec, gpu.spec)
    first = user.tier.alloc(user.tier.free_blocks // 2)
    assert len(user.on("gpu", first)) == len(first), "the faster memory is filled first"
    ids = np.concatenate([first, user.take_all()])
    user.write(ids)
    assert user.holds(ids)
    [address] = user.tier.addresses(user.on("host", ids)[:1]).tolist()
    block = int(user.on("host", ids)[0])
    assert peek(address, 4) == (block % 2**31).to_bytes(4, "little"), "the CPU sees host memory"
    links = {d["name"]: d for d in user.tier.status()["donors"]}
    for name, status in links.items():
        print(f"{name}: {status['link']}, {status['link_details']}")
    assert links["host"]["link"] == "host"
    assert links["gpu"]["link"] in ("local", "nvlink", "pcie-peer", "unknown")
    assert links["gpu"]["device_uuid"] == device_uuid(donor_ordinal)
    assert all(d["link_details"]["measured_gb_per_s"] > 0 for d in links.values())
    wait_until(
        lambda: query_status(gpu.paths, SETTINGS).receivers[0].gb_per_s,
        DEADLINE_S,
        "the donor is told how fast it is",
    )


@pytest.mark.parametrize("kind", ["cuda", "host"])
def test_copies_across_the_edges_of_extents(
    start_donor: Any, start_user: Any, view: GpuView, kind: str
) -> None:
    """Prints whether the copy engine does it; it may refuse, and may not read something else."""
    device = "host" if kind == "host" else f"cuda:{min(1, device_count() - 1)}"
    donor = start_donor("donor", device, "128MiB")
    user = start_user(donor.spec)
    ids = np.sort(user.take_all())
    user.write(ids)
    expected = b"".join((block % 2**31).to_bytes(4, "little") * 1024 for block in ids.tolist())
    start = int(user.tier.addresses(ids[:1])[0])
    straddler = ids[SETTINGS.extent_bytes // BLOCK]
    wanted = {
        "a block across an edge": (
            lambda: view.read(int(user.tier.addresses(np.array([straddler]))[0]), BLOCK),
            (int(straddler) % 2**31).to_bytes(4, "little") * (BLOCK // 4),
        ),
        "the first 4 KiB of each block, in one copy": (
            lambda: view.read_rows(start, 4096, BLOCK, len(ids)),
            expected,
        ),
    }
    for what, (read, data) in wanted.items():
        try:
            assert read() == data
            print(f"{kind}: {what}: works")
        except OSError as error:
            print(f"{kind}: {what}: {error}")


def test_memory_outlives_a_donor_that_is_killed(
    start_donor: Any, start_user: Any, donor_ordinal: int
) -> None:
    gpu = start_donor("gpu", f"cuda:{donor_ordinal}", "128MiB")
    host = start_donor("host", "host", "64MiB")
    user = start_user(gpu.spec, host.spec)
    ids = user.take_all()
    user.write(ids)
    doomed = user.on("gpu", ids)
    gpu.process.send_signal(signal.SIGKILL)
    user.poll_for(lambda: user.tier.must_vacate().size == len(doomed), "the loss is noticed")
    assert user.holds(ids)
    user.write(ids)
    assert user.holds(ids)
    user.tier.free(doomed)
    user.poll_for(lambda: list(user.tier.donor_names().values()) == ["host"], "it is forgotten")
    assert user.holds(np.setdiff1d(ids, doomed))


def test_a_donor_that_ends_gets_its_memory_back(
    start_donor: Any, start_user: Any, donor_ordinal: int
) -> None:
    gpu = start_donor("gpu", f"cuda:{donor_ordinal}", "128MiB")
    user = start_user(gpu.spec)
    ids = user.take_all()
    user.write(ids)
    gpu.process.send_signal(signal.SIGTERM)
    user.poll_for(lambda: user.tier.must_vacate().size == len(ids), "the donor asks it back")
    assert user.holds(ids)
    assert user.tier.alloc(1) is None
    user.tier.free(ids)
    user.poll_for(lambda: gpu.process.poll() is not None, "the donor ends")
    assert gpu.process.wait(DEADLINE_S) == 0
    assert not any(path.exists() for path in gpu.paths)
    assert user.tier.status()["reclaims"]["in_time"] == 1


def test_owned_donors(start_user: Any, donor_ordinal: int, runtime_dir: Path) -> None:
    user = start_user(f"cuda:{donor_ordinal}=128MiB", "host=64MiB")
    ids = user.take_all()
    user.write(ids)
    assert user.holds(ids)
    user.tier.close()
    assert list(runtime_dir.iterdir()) == []


def test_a_gigabyte_of_host_memory_is_locked_while_heartbeats_go_on(
    start_donor: Any, start_user: Any
) -> None:
    host = start_donor("host", "host", "4GiB")
    user = start_user(host.spec)
    assert user.tier.status()["bytes"] == 4 << 30
    (seen,) = query_status(host.paths, SETTINGS).receivers
    assert seen.extents["lent"] == (4 << 30) // SETTINGS.extent_bytes
    assert seen.heartbeat_age_s < SETTINGS.lost_after_s


def test_a_large_donor_is_quick_and_costs_its_gpu_little(
    start_donor: Any, start_user: Any, donor_ordinal: int
) -> None:
    """Prints how long it takes and what it costs; a context that stayed would be over the bound."""
    uuid = device_uuid(donor_ordinal)
    before = free_memory_bytes(uuid, load_nvml())
    if before is None or before < 24 << 30:
        pytest.skip("needs NVML, and 24 GiB free")
    size_bytes = 16 << 30
    donor = start_donor("gpu", f"cuda:{donor_ordinal}", str(size_bytes))
    user = start_user(donor.spec)
    assert user.tier.status()["bytes"] == size_bytes

    def cost() -> int:
        return before - size_bytes - (free_memory_bytes(uuid, load_nvml()) or 0)

    with contextlib.suppress(AssertionError):
        wait_until(lambda: cost() < 64 << 20, 15.0, "the donor gives its context back")
    print(f"beyond what it lends, the donor costs its GPU {format_size(max(0, cost()))}")
    assert cost() < 256 << 20


def test_specs_are_checked_without_the_driver_in_this_process(
    donor_ordinal: int, runtime_dir: Path
) -> None:
    script = (
        "from pathlib import Path\n"
        "from swiftcache_tier.errors import SwiftCacheError\n"
        "from swiftcache_tier.receiver import check_specs\n"
        "from swiftcache_tier.settings import Settings\n"
        "from swiftcache_tier.spec import parse_specs\n"
        "def check(spec):\n"
        "    check_specs(parse_specs([spec]), Path('DIR'), Settings(), 'cuda:0')\n"
        "check('cuda:N=64MiB')\n"
        "for wrong in ('cuda:N=9TiB', 'cuda:99=1GiB'):\n"
        "    try: check(wrong)\n"
        "    except SwiftCacheError as error: print(error)\n"
        "print('libcuda' in open('/proc/self/maps').read())\n"
    )
    script = script.replace("DIR", str(runtime_dir)).replace("cuda:N", f"cuda:{donor_ordinal}")
    status, output = run_child(script)
    assert status == 0
    large, absent, loaded = output.strip().splitlines()
    assert f"over what cuda:{donor_ordinal} has to give" in large
    assert "'cuda:99' cannot be used" in absent
    assert loaded == "False"
