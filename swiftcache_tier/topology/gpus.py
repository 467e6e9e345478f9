"""One GPU of this machine: what it is called, where it sits, what is free on it.

A GPU is named by its UUID, which is the same in every process; ordinals ("cuda:1") depend on
`CUDA_VISIBLE_DEVICES`, and NVML ignores that variable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftcache_tier.topology.nvml import ask, handle_of, pci_address_of

# GB/s (1e9 bytes) of one lane in one direction, by generation, after line coding.
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class PcieLink:
    """A GPU's PCI Express link. Idle GPUs slow it down, so `generation` may rise under load."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    @property
    def gb_per_s(self) -> float:
        """What it carries in one direction at its present width under load, in theory."""
        fastest = max(_LANE_GB_PER_S)
        return _LANE_GB_PER_S[min(max(self.max_generation, 1), fastest)] * self.width

    def __str__(self) -> str:
        full = f"PCIe {self.max_generation} x{self.width}"
        return full if self.width == self.max_width else f"{full} of x{self.max_width}"


@dataclass(frozen=True)
class Gpu:
    """A GPU; None where the machine does not tell."""

    uuid: str
    name: str | None
    pci_address: str | None
    """As the kernel spells it: "0000:3b:00.0"."""
    numa_node: int | None
    """The node of the CPUs and host memory nearest to it."""
    pcie: PcieLink | None


def find_gpu(uuid: str, nvml: Any | None, sysfs: Path = Path("/sys")) -> Gpu | None:
    """Describe the GPU with this UUID; None if NVML is absent or does not know it."""
    handle = handle_of(uuid, nvml)
    if handle is None:
        return None
    pci = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    pci_address = None if pci is None else pci_address_of(pci)
    return Gpu(
        uuid=uuid,
        name=ask(nvml, "nvmlDeviceGetName", handle),
        pci_address=pci_address,
        numa_node=None if pci_address is None else _numa_node(pci_address, sysfs),
        pcie=_pcie_link(nvml, handle),
    )


def free_memory_bytes(uuid: str, nvml: Any | None) -> int | None:
    """Free memory of a GPU, found without a context on it; None if it cannot be told."""
    handle = handle_of(uuid, nvml)
    memory = None if handle is None else ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else int(memory.free)


def _pcie_link(nvml: Any, handle: Any) -> PcieLink | None:
    answers = [
        ask(nvml, f"nvmlDeviceGet{question}", handle)
        for question in (
            "CurrPcieLinkGeneration",
            "CurrPcieLinkWidth",
            "MaxPcieLinkGeneration",
            "MaxPcieLinkWidth",
        )
    ]
    numbers = [int(answer) for answer in answers if answer]
    return PcieLink(*numbers) if len(numbers) == len(answers) else None


def _numa_node(pci_address: str, sysfs: Path) -> int | None:
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not tell
