"""A management library for machines that tests make up, with pynvml's names."""

# ruff: noqa: N802 - functions have the library's names.

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

LINKS_MAX = 18
SWITCH = "switch"
NO_ANSWER = "no answer"


def gpu_uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


@dataclass
class FakeGpu:
    """GPU `number` of a machine, at PCI address 0000:<number + 0x10>:00.0."""

    number: int
    link_ends: list[Any] = field(default_factory=list)
    """Where each active NVLink ends: a number of a GPU, SWITCH or NO_ANSWER."""
    pcie: tuple[int, int, int, int] | None = (1, 16, 5, 16)
    """Generation, width, and the most of both."""
    free_bytes: int | None = 7 << 30


class NVMLError(Exception):
    pass


class FakeNvml:
    """Answers for `gpus`; `p2p` names the pairs and capabilities whose status is good."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = LINKS_MAX
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
    NVML_P2P_STATUS_OK = 0
    NVML_P2P_CAPS_INDEX_READ = "READ"
    NVML_P2P_CAPS_INDEX_WRITE = "WRITE"
    NVML_P2P_CAPS_INDEX_NVLINK = "NVLINK"
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(
        self,
        *gpus: FakeGpu,
        p2p: frozenset[str] | None = frozenset(),
        link_mb_per_s: int | None = 26562,
    ) -> None:
        """`p2p`: capabilities all pairs have, or None if the driver does not tell."""
        self._gpus = {gpu_uuid(gpu.number): gpu for gpu in gpus}
        self._p2p = p2p
        self._link_mb_per_s = link_mb_per_s

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        gpu: FakeGpu = _known(self._gpus.get(uuid))
        return gpu

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return f"GPU {gpu.number}"

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return _pci(gpu.number)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(free=_known(gpu.free_bytes))

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return int(_known(gpu.pcie)[0])

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return int(_known(gpu.pcie)[1])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: FakeGpu) -> int:
        return int(_known(gpu.pcie)[2])

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: FakeGpu) -> int:
        return int(_known(gpu.pcie)[3])

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if not gpu.link_ends:
            raise NVMLError("not supported")
        return int(link < len(gpu.link_ends))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> SimpleNamespace:
        end = gpu.link_ends[link]
        if end == NO_ANSWER:
            raise NVMLError("not supported")
        return _pci(0xE0 + link if end == SWITCH else end)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        end = gpu.link_ends[link]
        if end == NO_ANSWER:
            raise NVMLError("not supported")
        return self.NVML_NVLINK_DEVICE_TYPE_SWITCH if end == SWITCH else 0

    def nvmlDeviceGetP2PStatus(self, one: FakeGpu, other: FakeGpu, capability: str) -> int:
        return 0 if capability in _known(self._p2p) else 5

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, fields: list[int]) -> list[SimpleNamespace]:
        speed = self._link_mb_per_s
        value = SimpleNamespace(uiVal=speed or 0)
        return [SimpleNamespace(nvmlReturn=3 if speed is None else 0, value=value)]


def _known(answer: Any) -> Any:
    if answer is None:
        raise NVMLError("not found, or not supported")
    return answer


def _pci(number: int) -> SimpleNamespace:
    return SimpleNamespace(domain=0, bus=0x10 + number, device=0)
