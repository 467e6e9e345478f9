"""Donor memory cut into blocks: where they lie, which are in use, on which donor to place more."""

from __future__ import annotations

from swiftcache_tier.blocks.geometry import DonorGeometry, SubRanges
from swiftcache_tier.blocks.kv_format import KVFormat
from swiftcache_tier.blocks.placement import DonorRank, Link, Room, share
from swiftcache_tier.blocks.pool import BlockCounts, BlockPool
from swiftcache_tier.blocks.replicas import NONE, Refill, Replicas

__all__ = [
    "NONE",
    "BlockCounts",
    "BlockPool",
    "DonorGeometry",
    "DonorRank",
    "KVFormat",
    "Link",
    "Refill",
    "Replicas",
    "Room",
    "SubRanges",
    "share",
]
