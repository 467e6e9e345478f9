"""Extents that fit two models: the minimum elastic unit (MEU), and what a lease of them wastes.

A donor that serves a model lends whole pages of its own pool, a receiver cuts what it gets into
blocks of its own size. Any two sizes go together: the donor chooses extents that its own pages
tile, the receiver maps them back to back and lets blocks straddle their edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size

# In units of the wanted extent size: larger ones would make lending coarse, so that extents of a
# fixed size are used instead and pages lie across their edges.
_LARGEST = 4
_UNALIGNED = 2


class Meu(NamedTuple):
    """The least run of memory that whole pages of both sides tile (the paper's elastic unit)."""

    unit_bytes: int
    receiver_pages: int
    donor_pages: int


class DonorExtent(NamedTuple):
    """The unit in which a donor lends. `pages`: its own in one extent, None where some straddle."""

    extent_bytes: int
    pages: int | None


class LeaseFit(NamedTuple):
    """Extents that lie back to back, as blocks. `waste_bytes` of `lease_bytes` are in no block."""

    extents: int
    lease_bytes: int
    blocks: int
    waste_bytes: int

    @property
    def waste(self) -> float:
        """Part of the lease that is in no block."""
        return self.waste_bytes / self.lease_bytes


def minimum_elastic_unit(receiver_page_bytes: int, donor_page_bytes: int) -> Meu:
    """The MEU of two page sizes, both in bytes over all layers.

    Of Qwen3-32B receiving from Qwen3-8B: 36 MiB, 9 and 16 pages.
    """
    unit_bytes = math.lcm(receiver_page_bytes, donor_page_bytes)
    return Meu(unit_bytes, unit_bytes // receiver_page_bytes, unit_bytes // donor_page_bytes)


def donor_extent(page_bytes: int, *, granularity_bytes: int, wanted_bytes: int) -> DonorExtent:
    """The extents of a donor whose pool has pages of `page_bytes`, fixed before it knows receivers.

    The least multiple of the page size and of `granularity_bytes`, in which memory can be mapped,
    that is at least `wanted_bytes`. Where that is more than 4 times what was wanted, twice what was
    wanted (rounded up to the granularity), and pages lie across the edges: such a page is used by
    neither side while the extent on either side of it is lent.
    """
    extent_bytes = _round_up(wanted_bytes, math.lcm(page_bytes, granularity_bytes))
    if extent_bytes <= _LARGEST * wanted_bytes:
        return DonorExtent(extent_bytes, extent_bytes // page_bytes)
    return DonorExtent(_round_up(_UNALIGNED * wanted_bytes, granularity_bytes), None)


def exact_extent_bytes(
    page_bytes: Iterable[int], *, granularity_bytes: int, wanted_bytes: int
) -> int:
    """Extents that pages of all these sizes tile: a donor's, and those of known receivers.

    A donor that wants extents of this size (`SWIFTCACHE_EXTENT_BYTES`) gets them, and nothing is
    wasted; for some models it is hundreds of MiB.
    """
    return _round_up(wanted_bytes, math.lcm(granularity_bytes, *page_bytes))


def fit_lease(extents: int, extent_bytes: int, block_bytes: int) -> LeaseFit:
    """`extents` back to back, cut into blocks of a receiver; under one block is wasted.

    Raises SwiftCacheError where a block is larger than all of them.
    """
    lease_bytes = extents * extent_bytes
    blocks, waste_bytes = divmod(lease_bytes, block_bytes)
    if not blocks:
        raise SwiftCacheError(
            f"a lease of {format_size(lease_bytes)} holds no block of {format_size(block_bytes)}: "
            f"lend at least {format_size(block_bytes)}, or serve the receiver with a smaller "
            f"--page-size"
        )
    return LeaseFit(extents, lease_bytes, blocks, waste_bytes)


def _round_up(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
