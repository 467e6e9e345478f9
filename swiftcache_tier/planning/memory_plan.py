"""A receiver's memory, on its device and with donors, as blocks and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftcache_tier.blocks.meu import (
    DonorExtent,
    LeaseFit,
    Meu,
    exact_extent_bytes,
    fit_lease,
    minimum_elastic_unit,
)
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.models import NamedModel, parse_model
from swiftcache_tier.planning.pairs import extent_of
from swiftcache_tier.settings import GPU_PAGE_BYTES
from swiftcache_tier.sizes import format_size, parse_size
from swiftcache_tier.spec import DonorSpec
from swiftcache_tier.stream.sizing import (
    SLOT_OVERHEAD_BYTES,
    StreamPlan,
    StreamShape,
    donor_blocks,
    plan_auto,
    plan_window,
    unit_tokens_of,
)


class DonorWish(NamedTuple):
    """What is to lend `size_bytes`: a server of `model`, or (None) a donor of plain memory."""

    name: str
    size_bytes: int
    model: NamedModel | None


class DonorPlan(NamedTuple):
    """What a donor comes to. `unit`: its MEU with the receiver, None for plain memory.

    `exact_extent_bytes`: the `SWIFTCACHE_EXTENT_BYTES` with which extents fit both sides exactly.
    """

    wish: DonorWish
    extent: DonorExtent
    lease: LeaseFit
    unit: Meu | None
    exact_extent_bytes: int


class MemoryPlan(NamedTuple):
    """Donors, and with them the receiver's sizes with and without a layer stream."""

    receiver: NamedModel
    local_bytes: int
    donors: tuple[DonorPlan, ...]
    resident_tokens: int
    """What fits on the device without a layer stream."""
    stream: StreamPlan

    @property
    def regular_blocks(self) -> int:
        """N_RC."""
        return self.stream.regular_tokens // self.receiver.kv.page_tokens

    @property
    def prefix_tokens(self) -> int:
        """What donors hold beside the blocks of the window."""
        free = sum(self.stream.blocks) - self.stream.streamed_blocks
        return free * self.receiver.kv.page_tokens


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
    context_tokens: int | None,
    wanted_extent_bytes: int,
) -> MemoryPlan:
    """What `receiver` gets of `local_bytes` for KV on its GPU and of the donors wished for.

    `window_tokens` is W, 0 for no layer stream, None what `--swiftcache-layer-stream auto` takes
    for contexts of `context_tokens`, None those of the receiver. Where `auto` finds no window worth
    having, R is the whole pool, as without a layer stream. Raises SwiftCacheError where a donor has
    not one extent or block, the window is larger than the donors, no memory is left for regular
    slots, or nobody says how long contexts are.
    """
    donors = tuple(_plan_donor(receiver, wish, wanted_extent_bytes) for wish in wishes)
    donated = [donor.lease.lease_bytes for donor in donors]
    kv = receiver.kv
    row_bytes = kv.layer_page_bytes // kv.page_tokens // 2
    shape = StreamShape(
        layers=kv.layers,
        token_layer_bytes=2 * row_bytes,
        page_tokens=kv.page_tokens,
        unit_tokens=unit_tokens_of(GPU_PAGE_BYTES, kv.page_tokens, (row_bytes, row_bytes)),
        slot_overhead_bytes=SLOT_OVERHEAD_BYTES,
    )
    resident_tokens = local_bytes // kv.page_bytes * kv.page_tokens
    no_window = StreamPlan(shape, resident_tokens, 0, donor_blocks(donated, shape))
    if window_tokens == 0:
        if not resident_tokens:
            raise SwiftCacheError(
                f"{format_size(local_bytes)} for KV hold not one block of "
                f"{format_size(kv.page_bytes)}: give --memory more"
            )
        stream = no_window
    elif window_tokens is not None:
        stream = plan_window(window_tokens, local_bytes, donated, shape)
    else:
        context = context_tokens or receiver.context_tokens
        if context is None:
            raise SwiftCacheError(
                f"the configuration of {receiver.name} has no max_position_embeddings: say how "
                f"long contexts are with --context TOKENS"
            )
        stream = plan_auto(local_bytes, donated, context, shape)
        if not stream.is_worth_having(resident_tokens):
            stream = no_window
    if stream.streamed_blocks < stream.window_pages:
        raise SwiftCacheError(
            f"a window of {stream.window_tokens} tokens needs {format_size(stream.donated_bytes)} "
            f"of donors, which lend {sum(stream.blocks)} blocks of {format_size(kv.page_bytes)}: "
            f"ask for a smaller window or more donors"
        )
    return MemoryPlan(receiver, local_bytes, donors, resident_tokens, stream)


def _plan_donor(receiver: NamedModel, wish: DonorWish, wanted_extent_bytes: int) -> DonorPlan:
    unit = None
    extent = DonorExtent(wanted_extent_bytes, None)
    pages = [receiver.kv.page_bytes]
    if wish.model is not None:
        extent = extent_of(wish.model.kv, wanted_extent_bytes)
        unit = minimum_elastic_unit(receiver.kv.page_bytes, wish.model.kv.page_bytes)
        pages.append(wish.model.kv.page_bytes)
    extents = wish.size_bytes // extent.extent_bytes
    if not extents:
        raise SwiftCacheError(
            f"donor {wish.name} of {format_size(wish.size_bytes)} has not one extent of "
            f"{format_size(extent.extent_bytes)}: give it at least so much"
        )
    return DonorPlan(
        wish,
        extent,
        fit_lease(extents, extent.extent_bytes, receiver.kv.page_bytes),
        unit,
        exact_extent_bytes(
            pages, granularity_bytes=GPU_PAGE_BYTES, wanted_bytes=wanted_extent_bytes
        ),
    )
