"""Which extents models lend, and how they fit the blocks of other models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_tier.blocks.kv_format import KVFormat
from swiftcache_tier.blocks.meu import (
    DonorExtent,
    LeaseFit,
    Meu,
    donor_extent,
    fit_lease,
    minimum_elastic_unit,
)
from swiftcache_tier.models import NamedModel
from swiftcache_tier.settings import GPU_PAGE_BYTES

LEASE_BYTES = 1 << 30
"""What a lease is measured by: the least number of extents that hold so much."""


class Pair(NamedTuple):
    """A receiver on a donor: their MEU, the donor's extents, a lease of 1 GiB of them."""

    unit: Meu
    extent: DonorExtent
    lease: LeaseFit


def extent_of(kv: KVFormat, wanted_bytes: int) -> DonorExtent:
    """The extents of a donor on a GPU that serves a model of this format."""
    return donor_extent(kv.page_bytes, granularity_bytes=GPU_PAGE_BYTES, wanted_bytes=wanted_bytes)


def pair(receiver: KVFormat, donor: KVFormat, wanted_bytes: int) -> Pair:
    """Raises SwiftCacheError where one block of the receiver exceeds the lease."""
    extent = extent_of(donor, wanted_bytes)
    extents = -(-LEASE_BYTES // extent.extent_bytes)
    return Pair(
        minimum_elastic_unit(receiver.page_bytes, donor.page_bytes),
        extent,
        fit_lease(extents, extent.extent_bytes, receiver.page_bytes),
    )


def pair_tables(models: Sequence[NamedModel], wanted_bytes: int) -> str:
    """Markdown: the models by their formats, the MEU of each two, the waste of a 1 GiB lease.

    Models whose pages have the same bytes share a line. Receivers are rows, donors columns.
    """
    by_page: dict[int, list[NamedModel]] = {}
    for model in sorted(models, key=lambda model: model.kv.page_bytes):
        by_page.setdefault(model.kv.page_bytes, []).append(model)
    groups = list(by_page.values())
    sizes = [_mib(page_bytes) for page_bytes in by_page]
    donors = [group[0].kv for group in groups]
    units, wastes = [], []
    for size, group in zip(sizes, groups, strict=True):
        pairs = [pair(group[0].kv, donor, wanted_bytes) for donor in donors]
        units.append([f"**{size}**", *(_unit_cell(p.unit) for p in pairs)])
        wastes.append([f"**{size}**", *(f"{p.lease.waste:.2%}" for p in pairs)])
    corner = ["receiver \\ donor", *sizes]
    return "\n\n".join(
        [
            _table(
                [
                    "page, MiB",
                    "extent, MiB",
                    "pages in it",
                    "models (layers x KV heads x head dim)",
                ],
                [
                    [size, *_extent_cells(group[0].kv, wanted_bytes), _names(group)]
                    for size, group in zip(sizes, groups, strict=True)
                ],
            ),
            "MEU in MiB (receiver blocks / donor pages), by page size in MiB:\n\n"
            + _table(corner, units),
            "Waste of a lease of 1 GiB, by page size in MiB:\n\n" + _table(corner, wastes),
        ]
    )


def _extent_cells(kv: KVFormat, wanted_bytes: int) -> tuple[str, str]:
    extent = extent_of(kv, wanted_bytes)
    return _mib(extent.extent_bytes), str(extent.pages or "straddle")


def _unit_cell(unit: Meu) -> str:
    return f"{_mib(unit.unit_bytes)} ({unit.receiver_pages}/{unit.donor_pages})"


def _mib(size_bytes: int) -> str:
    """Exact, which pages of 2.25 and 2.9375 MiB need."""
    return f"{size_bytes / (1 << 20):g}"


def _names(group: Sequence[NamedModel]) -> str:
    return ", ".join(
        f"{model.name} ({model.kv.layers}x{model.kv.kv_heads}x{model.kv.head_dim})"
        for model in group
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
