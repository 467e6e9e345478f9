"""The receiver: a process that keeps blocks in memory which donors lend it."""

from __future__ import annotations

from swiftcache_tier.receiver.check import check_specs
from swiftcache_tier.receiver.tier import DonorTier

__all__ = ["DonorTier", "check_specs"]
