"""The machine as the tier sees it: GPUs, what connects them, NUMA nodes.

Nothing here needs a GPU; where there is none, or no NVML, less is known and nothing fails.
`topology.bandwidth`, which does need one, is imported by itself.
"""

from __future__ import annotations

from swiftcache_tier.topology.gpus import Gpu, PcieLink, find_gpu, free_memory_bytes
from swiftcache_tier.topology.links import LinkKind, LinkReport, link_between
from swiftcache_tier.topology.numa import numa_nodes, pin_thread_to_numa_node, prefer_numa_node
from swiftcache_tier.topology.nvml import load_nvml

__all__ = [
    "Gpu",
    "LinkKind",
    "LinkReport",
    "PcieLink",
    "find_gpu",
    "free_memory_bytes",
    "link_between",
    "load_nvml",
    "numa_nodes",
    "pin_thread_to_numa_node",
    "prefer_numa_node",
]
