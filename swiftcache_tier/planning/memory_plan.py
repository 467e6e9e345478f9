"""A receiver's memory, on its device and with donors, as blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_tier.blocks.meu import DonorExtent, LeaseFit, Meu, fit_lease, minimum_elastic_unit
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.models import NamedModel, parse_model
from swiftcache_tier.planning.pairs import extent_of
from swiftcache_tier.sizes import format_size, parse_size
from swiftcache_tier.spec import DonorSpec
from swiftcache_tier.stream.sizing import StreamSizes, stream_sizes


class DonorWish(NamedTuple):
    """What is to lend `size_bytes`: a server of `model`, or (None) a donor of plain memory."""

    name: str
    size_bytes: int
    model: NamedModel | None


class DonorPlan(NamedTuple):
    """What a donor comes to. `unit`: its MEU with the receiver, None for plain memory."""

    wish: DonorWish
    extent: DonorExtent
    lease: LeaseFit
    unit: Meu | None


class MemoryPlan(NamedTuple):
    """Donors, and with them the receiver's sizes with and without a layer stream."""

    receiver: NamedModel
    local_bytes: int
    donors: tuple[DonorPlan, ...]
    resident_tokens: int
    """What fits on the device without a layer stream."""
    stream: StreamSizes
    prefix_tokens: int
    """What donors hold beside the blocks of the window."""


def parse_donor(text: str) -> DonorWish:
    """`MODEL=SIZE`, `host=SIZE` or `cuda:N=SIZE`. Raises SwiftCacheError naming `text`."""
    name, equals, size = text.rpartition("=")
    if not equals or not name:
        raise SwiftCacheError(
            f"donor {text!r} is not known: expected MODEL=SIZE of a server that lends, as in "
            f"Qwen3-8B=20GiB, or host=8GiB or cuda:1=40GiB"
        )
    if name == "host" or name.startswith("cuda:"):
        spec = DonorSpec.parse(text)
        return DonorWish(spec.source, spec.size_bytes or 0, None)
    try:
        return DonorWish(name, parse_size(size), parse_model(name))
    except SwiftCacheError as error:
        raise SwiftCacheError(f"donor {text!r}: {error}") from None


def plan_memory(
    receiver: NamedModel,
    local_bytes: int,
    wishes: Sequence[DonorWish],
    window_tokens: int | None,
    wanted_extent_bytes: int,
) -> MemoryPlan:
    """What `receiver` gets of `local_bytes` for KV on its device and of the donors wished for.

    `window_tokens` as for `stream_sizes`. Raises SwiftCacheError where a donor has not one extent
    or block, or the window leaves no regular page.
    """
    donors = tuple(_plan_donor(receiver, wish, wanted_extent_bytes) for wish in wishes)
    stream = stream_sizes(
        local_bytes, [donor.lease.lease_bytes for donor in donors], receiver.kv, window_tokens
    )
    page_tokens = receiver.kv.page_tokens
    return MemoryPlan(
        receiver,
        local_bytes,
        donors,
        local_bytes // receiver.kv.page_bytes * page_tokens,
        stream,
        (sum(stream.donor_blocks) - stream.n_lsc) * page_tokens,
    )


def _plan_donor(receiver: NamedModel, wish: DonorWish, wanted_extent_bytes: int) -> DonorPlan:
    unit = None
    extent = DonorExtent(wanted_extent_bytes, None)
    if wish.model is not None:
        extent = extent_of(wish.model.kv, wanted_extent_bytes)
        unit = minimum_elastic_unit(receiver.kv.page_bytes, wish.model.kv.page_bytes)
    extents = wish.size_bytes // extent.extent_bytes
    if not extents:
        raise SwiftCacheError(
            f"donor {wish.name} of {format_size(wish.size_bytes)} has not one extent of "
            f"{format_size(extent.extent_bytes)}: give it at least so much"
        )
    return DonorPlan(
        wish, extent, fit_lease(extents, extent.extent_bytes, receiver.kv.page_bytes), unit
    )
