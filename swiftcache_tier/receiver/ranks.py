"""What a receiver knows of donors by their device."""

from __future__ import annotations

from swiftcache_tier.blocks import DonorRank, Link
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents import HostArena

# All host memory is reached alike, so this bandwidth weighs nothing against other host donors.
_RANK_OF_DEVICE = {HostArena.device: DonorRank(Link.HOST, gb_per_s=50.0)}


def rank_of_device(device: str) -> DonorRank:
    """Raises SwiftCacheError for a device whose memory this receiver cannot map."""
    rank = _RANK_OF_DEVICE.get(device)
    if rank is None:
        raise SwiftCacheError(
            f"memory of device {device} cannot be mapped by this receiver: name a donor of "
            f"{' or '.join(_RANK_OF_DEVICE)}"
        )
    return rank
