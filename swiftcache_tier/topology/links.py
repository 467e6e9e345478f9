"""How a receiver reaches a donor's memory, and how fast that should be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from swiftcache_tier.blocks.placement import DonorRank, Link
from swiftcache_tier.topology.gpus import Gpu, PcieLink, find_gpu
from swiftcache_tier.topology.nvml import ask, handle_of, pci_address_of

LinkKind = Literal["local", "nvlink", "pcie-peer", "host", "unknown", "unreachable"]
"""`local`: memory of the receiver's own GPU. `host`: memory of the host, for a GPU or a CPU.
`unknown`: between two GPUs, but nothing tells what; taken for PCIe. `unreachable`: GPUs that
cannot address each other."""

_LINK_OF_KIND: dict[LinkKind, Link] = {
    "local": Link.NVLINK,
    "nvlink": Link.NVLINK,
    "pcie-peer": Link.PCIE_PEER,
    "unknown": Link.PCIE_PEER,
    "host": Link.HOST,
}

# Where nothing was measured: parts of the theoretical rate that copies reach, and plain guesses.
_REACHED_OF_NVLINK = 0.82
_REACHED_OF_PCIE = 0.87
_LOCAL_GB_PER_S = 1500.0
_UNKNOWN_GB_PER_S = 12.0
_CPU_COPY_GB_PER_S = 8.0
# Per direction and link from the second NVLink generation to the fourth.
_NVLINK_GB_PER_S = 25.0


@dataclass(frozen=True)
class LinkReport:
    """The way from a receiver to a donor's memory."""

    kind: LinkKind
    nvlinks: int = 0
    """Active links between the two, through switches or not."""
    through_switch: bool = False
    nvlink_gb_per_s: float = 0.0
    """Of all those links together, in one direction, in theory."""
    pcie: PcieLink | None = None
    """The slower of the two GPUs' links; the receiver's alone for `host`."""
    receiver_numa_node: int | None = None
    donor_numa_node: int | None = None

    @property
    def reachable(self) -> bool:
        return self.kind != "unreachable"

    @property
    def expected_gb_per_s(self) -> float:
        """A guess at what copies reach, for when nothing was measured; never 0."""
        if self.kind == "local":
            return _LOCAL_GB_PER_S
        if self.kind == "nvlink":
            return (self.nvlink_gb_per_s or _NVLINK_GB_PER_S) * _REACHED_OF_NVLINK
        if self.pcie is not None:
            return self.pcie.gb_per_s * _REACHED_OF_PCIE
        return _CPU_COPY_GB_PER_S if self.kind == "host" else _UNKNOWN_GB_PER_S

    def rank(self, measured_gb_per_s: float | None = None) -> DonorRank:
        """For placement. Raises ValueError if the donor cannot be reached."""
        if not self.reachable:
            raise ValueError("a donor that cannot be reached has no rank")
        gb_per_s = self.expected_gb_per_s if measured_gb_per_s is None else measured_gb_per_s
        return DonorRank(_LINK_OF_KIND[self.kind], gb_per_s)

    def as_status(self) -> dict[str, Any]:
        """Plain values for `swiftcache status --json`."""
        return asdict(self)

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        if self.kind == "nvlink":
            words[0] = f"nvlink x{self.nvlinks}"
            if self.through_switch:
                words.append("through NVSwitch")
        if self.pcie is not None:
            words.append(str(self.pcie))
        nodes = (self.receiver_numa_node, self.donor_numa_node)
        if None not in nodes and nodes[0] != nodes[1]:
            words.append(f"NUMA node {nodes[0]} to {nodes[1]}")
        return ", ".join(words)


def link_between(
    receiver_uuid: str | None,
    donor_uuid: str | None,
    nvml: Any | None,
    *,
    can_access_peer: bool | None = None,
    sysfs: Path = Path("/sys"),
) -> LinkReport:
    """How the receiver reaches the donor, each a GPU's UUID or None for host memory and CPUs.

    `can_access_peer` is the CUDA driver's word on two GPUs, if it was asked: it decides whether
    they reach each other; NVML tells by what. Never fails: what is not known is left out.
    """
    receiver = None if receiver_uuid is None else find_gpu(receiver_uuid, nvml, sysfs)
    donor = None if donor_uuid is None else find_gpu(donor_uuid, nvml, sysfs)
    if donor_uuid is None:
        report = LinkReport("host", pcie=receiver.pcie if receiver else None)
    elif receiver_uuid is None or can_access_peer is False:
        report = LinkReport("unreachable")
    elif receiver_uuid == donor_uuid:
        report = LinkReport("local")
    elif receiver is None or donor is None:
        report = LinkReport("unknown")
    else:
        report = _link_between_two(receiver, donor, nvml, can_access_peer)
    return replace(
        report,
        receiver_numa_node=receiver.numa_node if receiver else None,
        donor_numa_node=donor.numa_node if donor else None,
    )


def _link_between_two(
    receiver: Gpu, donor: Gpu, nvml: Any, can_access_peer: bool | None
) -> LinkReport:
    pcie = _slower(receiver.pcie, donor.pcie)
    count, through_switch = _nvlinks(nvml, receiver, donor)
    if count:
        rate = count * _gb_per_s_of_a_link(nvml, receiver.uuid)
        return LinkReport("nvlink", count, through_switch, rate, pcie)
    peers = can_access_peer or _peers_over_pcie(nvml, receiver, donor)
    kind: LinkKind = "unknown" if peers is None else "pcie-peer" if peers else "unreachable"
    return LinkReport(kind, pcie=pcie)


def _slower(one: PcieLink | None, other: PcieLink | None) -> PcieLink | None:
    known = [link for link in (one, other) if link is not None]
    return min(known, key=lambda link: link.gb_per_s, default=None)


def _nvlinks(nvml: Any, receiver: Gpu, donor: Gpu) -> tuple[int, bool]:
    """How many links there are between two GPUs, and whether they go through switches."""
    direct, others = _active_links(nvml, receiver, donor)
    if direct:
        return direct, False
    # Links that end at no GPU end at switches, which connect all GPUs that the driver says can
    # address each other by NVLink. Each GPU may have a different number of them.
    if _p2p_status(nvml, receiver, donor, "NVLINK"):
        _, donors_others = _active_links(nvml, donor, receiver)
        return min(others, donors_others), True
    return 0, False


def _active_links(nvml: Any, gpu: Gpu, other: Gpu) -> tuple[int, int]:
    """Active links of `gpu` that end at `other`, and those that end at no GPU."""
    handle = handle_of(gpu.uuid, nvml)
    direct = elsewhere = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if ask(nvml, "nvmlDeviceGetNvLinkState", handle, link) != nvml.NVML_FEATURE_ENABLED:
            continue
        end = ask(nvml, "nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        if end is not None and pci_address_of(end) == other.pci_address:
            direct += 1
            continue
        kind = ask(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        elsewhere += kind != nvml.NVML_NVLINK_DEVICE_TYPE_GPU
    return direct, elsewhere


def _peers_over_pcie(nvml: Any, receiver: Gpu, donor: Gpu) -> bool | None:
    answers = [_p2p_status(nvml, receiver, donor, word) for word in ("READ", "WRITE")]
    return None if None in answers else all(answers)


def _p2p_status(nvml: Any, receiver: Gpu, donor: Gpu, capability: str) -> bool | None:
    status = ask(
        nvml,
        "nvmlDeviceGetP2PStatus",
        handle_of(receiver.uuid, nvml),
        handle_of(donor.uuid, nvml),
        getattr(nvml, f"NVML_P2P_CAPS_INDEX_{capability}"),
    )
    return None if status is None else bool(status == nvml.NVML_P2P_STATUS_OK)


def _gb_per_s_of_a_link(nvml: Any, uuid: str) -> float:
    question = [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    fields = ask(nvml, "nvmlDeviceGetFieldValues", handle_of(uuid, nvml), question)
    if fields is None or fields[0].nvmlReturn != nvml.NVML_SUCCESS or not fields[0].value.uiVal:
        return _NVLINK_GB_PER_S
    return float(fields[0].value.uiVal) / 1000
