"""What NVML and the driver tell of this machine's GPUs."""

from __future__ import annotations

import itertools
import os

import pytest

from support.gpu_memory import gpu_donor
from support.raw_memory import run_child
from swiftcache_tier.blocks import Link
from swiftcache_tier.cuda_driver import can_access_peer, device_count, device_uuid, ordinal_of
from swiftcache_tier.extents.cuda_address_range import CudaAddressRange
from swiftcache_tier.topology import find_gpu, link_between, load_nvml
from swiftcache_tier.topology.bandwidth import measure_bandwidth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_count() == 0, reason="needs a CUDA GPU"),
]

SIZE = 32 << 20


def test_nvml_knows_the_gpus_that_cuda_numbers() -> None:
    if load_nvml() is None:
        pytest.skip("needs NVML")
    for ordinal in range(device_count()):
        uuid = device_uuid(ordinal)
        gpu = find_gpu(uuid, load_nvml())
        assert gpu is not None
        print(f"cuda:{ordinal}: {gpu}")
        assert ordinal_of(uuid) == ordinal
    assert ordinal_of("GPU-none") is None


def test_a_gpu_keeps_its_id_when_others_are_hidden() -> None:
    last = device_count() - 1
    status, output = run_child(
        "import os\n"
        f"os.environ['CUDA_VISIBLE_DEVICES'] = '{device_uuid(last)}'\n"
        "from swiftcache_tier.cuda_driver import device_uuid\n"
        "print(device_uuid(0))\n"
    )
    assert status == 0
    assert output.strip() == device_uuid(last)


def test_links_between_all_pairs() -> None:
    for one, other in itertools.product(range(device_count()), repeat=2):
        reach = can_access_peer(one, other)
        uuids = device_uuid(one), device_uuid(other)
        link = link_between(*uuids, load_nvml(), can_access_peer=reach)
        print(f"cuda:{one} to cuda:{other}: {link}")
        assert link.reachable == reach
        assert (link.kind == "local") == (one == other)
        # What NVML says of peer access agrees with what the driver does.
        if load_nvml() is not None:
            assert link_between(*uuids, load_nvml()).reachable == reach


def test_bandwidth_from_a_donor(donor_ordinal: int) -> None:
    addresses = CudaAddressRange(SIZE, ordinal=0)
    with gpu_donor(donor_ordinal, SIZE) as donor:
        descriptor = donor.share()
        addresses.map(0, descriptor, SIZE)
        os.close(descriptor)
        gb_per_s = measure_bandwidth(0, addresses.base, SIZE)
        link = link_between(device_uuid(0), device_uuid(donor_ordinal), load_nvml())
        print(f"{link}: {gb_per_s:.1f} GB/s, {link.expected_gb_per_s:.1f} GB/s expected")
        assert gb_per_s > 0
        assert link.rank(gb_per_s).link >= Link.PCIE_PEER
    addresses.close()


def test_asking_makes_no_context() -> None:
    status, output = run_child(
        "from cuda.bindings import driver as cu\n"
        "from swiftcache_tier.cuda_driver import device, device_uuid\n"
        "from swiftcache_tier.extents.cuda import CudaArena\n"
        "from swiftcache_tier.topology import link_between, load_nvml\n"
        "arena = CudaArena(0)\n"
        "if load_nvml() is not None:\n"
        "    arena.available_bytes()\n"
        "link_between(device_uuid(0), device_uuid(0), load_nvml())\n"
        "print(cu.cuDevicePrimaryCtxGetState(device(0))[2])\n"
    )
    assert status == 0
    assert output.strip() == "0"
