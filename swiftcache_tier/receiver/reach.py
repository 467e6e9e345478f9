"""Which donors a receiver can use, and how it reaches their memory."""

from __future__ import annotations

import logging
import os

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena, describe_device, receiver_ordinal
from swiftcache_tier.topology import LinkReport, find_gpu, link_between, load_nvml

logger = logging.getLogger(__name__)

# Copies of less are over before they reach full speed; copies of more take longer than they tell.
_MEASURED_BYTES_MIN = 1 << 20
_MEASURED_BYTES_MAX = 32 << 20


def kind_of(device: str, receiver_device: str) -> str:
    """The kind of memory of a donor's device: "host" or "cuda".

    Raises SwiftCacheError when a receiver on `receiver_device` ("cpu", "cuda:N") cannot map it.
    """
    kind = device.partition(":")[0]
    kinds = [HostArena.device]
    if receiver_ordinal(receiver_device) is not None:
        kinds.append("cuda")
    if kind not in kinds:
        raise SwiftCacheError(
            f"memory of device {device} cannot be mapped by a receiver on {receiver_device}: name "
            f"a donor of {' or '.join(kinds)} memory"
        )
    return kind


class Reach:
    """The device that a receiver computes on, and the ways from there to the memory of donors.

    On a GPU it asks the CUDA driver and NVML, which takes some ms. Used by one thread at a time.
    """

    def __init__(self, device: str) -> None:
        """`device`: "cpu" or "cuda:N". Raises SwiftCacheError when there is no such device."""
        self.device = device
        self._ordinal = receiver_ordinal(device)
        self._uuid: str | None = None
        self.numa_node: int | None = None
        """Of the GPU; None where nodes do not matter."""
        if self._ordinal is not None:
            self._find(self._ordinal)

    @property
    def pins_host_memory(self) -> bool:
        """Whether host memory is locked as it is mapped, which takes time."""
        return self._ordinal is not None

    def link_to(self, device: str, uuid: str | None) -> LinkReport:
        """The way to the memory of a donor on `device`, a GPU with that UUID or the host.

        Raises SwiftCacheError when there is no way.
        """
        if kind_of(device, self.device) == HostArena.device or self._ordinal is None:
            return link_between(self._uuid, None, load_nvml() if self._uuid else None)
        from swiftcache_tier.cuda_driver import can_access_peer, ordinal_of

        ordinal = None if uuid is None else ordinal_of(uuid)
        if ordinal is None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise SwiftCacheError(
                f"its GPU {uuid} is not seen by this process: make it visible to both "
                f"(CUDA_VISIBLE_DEVICES, here {visible}), or name a donor on another"
            )
        reach = can_access_peer(self._ordinal, ordinal)
        link = link_between(self._uuid, uuid, load_nvml(), can_access_peer=reach)
        if not link.reachable:
            raise SwiftCacheError(
                f"the memory of its GPU {uuid} cannot be addressed from {self.device}: there is no "
                f"peer access between them; lend host memory instead"
            )
        return link

    def measure(self, address: int, size_bytes: int) -> float | None:
        """GB/s at which the GPU reads what is mapped there; None on a CPU, or if it cannot tell.

        Waits for the copies, a few ms. Less than 1 MiB does not tell.
        """
        if self._ordinal is None or size_bytes < _MEASURED_BYTES_MIN:
            return None
        from swiftcache_tier.topology.bandwidth import measure_bandwidth

        try:
            return measure_bandwidth(self._ordinal, address, min(size_bytes, _MEASURED_BYTES_MAX))
        except OSError as error:
            logger.info("%s: bandwidth is taken as expected, not measured: %s", self.device, error)
            return None

    def _find(self, ordinal: int) -> None:
        from swiftcache_tier.cuda_driver import device_uuid

        self._uuid = device_uuid(ordinal)
        gpu = find_gpu(self._uuid, load_nvml())
        self.numa_node = gpu.numa_node if gpu else None
        words = [describe_device(self.device, self._uuid, gpu.name if gpu else None)]
        if gpu is not None and gpu.pcie is not None:
            words.append(str(gpu.pcie))
        if self.numa_node is not None:
            words.append(f"NUMA node {self.numa_node}")
        logger.info("receiver on %s", ", ".join(words))
