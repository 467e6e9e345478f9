"""What connects a receiver with a donor's memory."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest

from support.fake_nvml import NO_ANSWER, SWITCH, FakeGpu, FakeNvml, gpu_uuid
from swiftcache_tier.blocks import Link
from swiftcache_tier.topology import (
    LinkKind,
    LinkReport,
    find_gpu,
    free_memory_bytes,
    link_between,
    load_nvml,
    nvml,
)

ALL = frozenset({"READ", "WRITE", "NVLINK"})
OVER_PCIE = frozenset({"READ", "WRITE"})
ONE, OTHER = gpu_uuid(0), gpu_uuid(1)


def test_links_that_go_through_switches() -> None:
    library = FakeNvml(FakeGpu(0, [SWITCH] * 18), FakeGpu(1, [SWITCH] * 18), p2p=ALL)
    link = link_between(ONE, OTHER, library)
    assert (link.kind, link.nvlinks, link.through_switch) == ("nvlink", 18, True)
    assert link.nvlink_gb_per_s == pytest.approx(18 * 26.562)
    assert link.rank().link is Link.NVLINK
    assert str(link) == "nvlink x18, through NVSwitch, PCIe 5 x16"


def test_a_switch_that_does_not_say_what_it_is() -> None:
    library = FakeNvml(FakeGpu(0, [NO_ANSWER] * 18), FakeGpu(1, [NO_ANSWER] * 12), p2p=ALL)
    link = link_between(ONE, OTHER, library)
    assert (link.kind, link.nvlinks) == ("nvlink", 12)


def test_links_between_the_two_alone_count() -> None:
    library = FakeNvml(FakeGpu(0, [1, 2, 2, 1, 3, 1]), FakeGpu(1, [0, 0, 0]), FakeGpu(2), p2p=ALL)
    link = link_between(ONE, OTHER, library)
    assert (link.kind, link.nvlinks, link.through_switch) == ("nvlink", 3, False)
    assert link_between(ONE, gpu_uuid(2), library).nvlinks == 2


def test_gpus_with_links_that_lead_elsewhere_use_pcie() -> None:
    library = FakeNvml(FakeGpu(0, [2, 2]), FakeGpu(1, [3, 3]), p2p=OVER_PCIE)
    assert link_between(ONE, OTHER, library).kind == "pcie-peer"


def test_switches_that_do_not_connect_the_two() -> None:
    """Two partitions of one machine, for two tenants."""
    library = FakeNvml(FakeGpu(0, [SWITCH] * 18), FakeGpu(1, [SWITCH] * 18))
    assert link_between(ONE, OTHER, library).kind == "unreachable"


def test_pcie_is_as_fast_as_its_slower_end_under_load() -> None:
    library = FakeNvml(FakeGpu(0, pcie=(1, 16, 5, 16)), FakeGpu(1, pcie=(4, 8, 4, 16)), p2p=ALL)
    link = link_between(ONE, OTHER, library)
    assert link.kind == "pcie-peer"
    assert link.pcie is not None
    assert link.pcie.gb_per_s == pytest.approx(15.75, rel=0.01)
    assert str(link) == "pcie-peer, PCIe 4 x8 of x16"
    assert link_between(OTHER, ONE, library).pcie == link.pcie


def test_host_memory_is_as_far_as_the_receivers_pcie() -> None:
    link = link_between(ONE, None, FakeNvml(FakeGpu(0)))
    assert link.kind == "host"
    assert link.rank().link is Link.HOST
    # 55 GB/s were measured on such a link.
    assert link.rank().gb_per_s == pytest.approx(55, rel=0.05)


@pytest.mark.parametrize(
    ("can_access_peer", "p2p", "kind"),
    [
        (True, frozenset(), "pcie-peer"),
        (True, None, "pcie-peer"),
        (False, ALL, "unreachable"),
        (None, OVER_PCIE, "pcie-peer"),
        (None, frozenset({"READ"}), "unreachable"),
        (None, None, "unknown"),
    ],
)
def test_the_cuda_driver_decides_whether_gpus_reach_each_other(
    can_access_peer: bool | None, p2p: frozenset[str] | None, kind: LinkKind
) -> None:
    library = FakeNvml(FakeGpu(0), FakeGpu(1), p2p=p2p)
    link = link_between(ONE, OTHER, library, can_access_peer=can_access_peer)
    assert link.kind == kind
    assert link.reachable == (kind != "unreachable")


@pytest.mark.parametrize("library", [None, FakeNvml(), FakeNvml(FakeGpu(0, pcie=None))])
def test_where_nothing_is_known_a_peer_counts_as_pcie(library: FakeNvml | None) -> None:
    link = link_between(ONE, OTHER, library)
    assert link.kind == "unknown"
    assert link.rank().link is Link.PCIE_PEER
    assert link.rank(3.5).gb_per_s == 3.5


def test_a_machine_without_gpus() -> None:
    link = link_between(None, None, None)
    assert link == LinkReport("host")
    assert link.rank().gb_per_s > 0
    assert link_between(None, ONE, None).kind == "unreachable"
    assert find_gpu(ONE, None) is None
    assert free_memory_bytes(ONE, None) is None


def test_memory_of_the_receivers_own_gpu_comes_first() -> None:
    library = FakeNvml(FakeGpu(0, [SWITCH] * 18), FakeGpu(1, [SWITCH] * 18), p2p=ALL)
    own, peer = (link_between(ONE, uuid, library).rank() for uuid in (ONE, OTHER))
    assert own.link is Link.NVLINK
    assert own.gb_per_s > peer.gb_per_s > link_between(ONE, None, library).rank().gb_per_s
    with pytest.raises(ValueError, match="no rank"):
        LinkReport("unreachable").rank()


def test_nodes_are_read_from_the_kernel(tmp_path: Path) -> None:
    for number, node in ((0, "0"), (1, "1"), (2, "-1")):
        folder = tmp_path / f"bus/pci/devices/0000:{number + 0x10:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    library = FakeNvml(*(FakeGpu(number) for number in range(4)), p2p=OVER_PCIE)
    link = link_between(ONE, OTHER, library, sysfs=tmp_path)
    assert (link.receiver_numa_node, link.donor_numa_node) == (0, 1)
    assert "NUMA node 0 to 1" in str(link)
    for number in (2, 3):
        gpu = find_gpu(gpu_uuid(number), library, tmp_path)
        assert gpu is not None
        assert gpu.numa_node is None


def test_free_memory_without_a_context() -> None:
    library = FakeNvml(FakeGpu(0, free_bytes=5 << 30), FakeGpu(1, free_bytes=None))
    assert free_memory_bytes(ONE, library) == 5 << 30
    assert free_memory_bytes(OTHER, library) is None
    assert free_memory_bytes(gpu_uuid(9), library) is None


def test_links_of_unknown_speed() -> None:
    library = FakeNvml(FakeGpu(0, [1] * 4), FakeGpu(1, [0] * 4), link_mb_per_s=None)
    assert link_between(ONE, OTHER, library).nvlink_gb_per_s == 100


def test_a_report_is_plain_json() -> None:
    library = FakeNvml(FakeGpu(0, [1] * 4), FakeGpu(1, [0] * 4))
    status = json.loads(json.dumps(link_between(ONE, OTHER, library).as_status()))
    assert status["kind"] == "nvlink"
    assert status["pcie"]["max_generation"] == 5


def test_a_machine_without_the_library_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(nvml.pynvml, "nvmlInit", absent)
    load_nvml.cache_clear()
    with caplog.at_level("INFO"):
        assert load_nvml() is None
        assert load_nvml() is None
    load_nvml.cache_clear()
    assert len([record for record in caplog.records if "NVML" in record.getMessage()]) == 1
