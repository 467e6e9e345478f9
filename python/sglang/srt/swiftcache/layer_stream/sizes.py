"""R and W of a server: from ``--swiftcache-layer-stream`` and the memory that there is."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang.srt.swiftcache.flag_words import AUTO
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.aliased import unit_tokens
from swiftcache_tier.receiver.offered import offered_bytes
from swiftcache_tier.settings import Settings
from swiftcache_tier.spec import parse_specs
from swiftcache_tier.stream import StreamPlan, plan_auto, plan_window, regular_tokens_for
from swiftcache_tier.stream.sizing import SLOT_OVERHEAD_BYTES, StreamShape, least_regular_tokens

logger = logging.getLogger(__name__)


def shape_of(configurator: Any) -> StreamShape:
    """What the sizes depend on. ``configurator``: SGLang's KVCacheConfigurator."""
    model = configurator.model_config
    # more than one rank is refused, so that all heads are here
    heads, item_bytes = model.get_num_kv_heads(1), configurator.kv_cache_dtype.itemsize
    rows = (heads * model.head_dim * item_bytes, heads * model.v_head_dim * item_bytes)
    device = "cpu" if configurator.device == "cpu" else f"cuda:{configurator.gpu_id}"
    page = configurator.pool_page_size
    return StreamShape(
        layers=configurator.layer_info.num_effective_layers,
        token_layer_bytes=sum(rows),
        page_tokens=page,
        unit_tokens=unit_tokens(device, page, rows),
        slot_overhead_bytes=SLOT_OVERHEAD_BYTES,
    )


def check_room(args: Any, configurator: Any, budget_bytes: int) -> None:
    """Before SGLang makes sizes of the budget, which ends in a traceback where there is no room.

    Raises SwiftCacheError where not even the least regular slots fit in.
    """
    shape = shape_of(configurator)
    limit = args.max_total_tokens
    if limit is not None and regular_tokens_for(limit, shape) == 0:
        raise SwiftCacheError(
            f"--max-total-tokens {limit} leaves no regular slots: beside a layer window this model "
            f"needs {least_regular_tokens(shape)} or more; raise it or drop it"
        )
    plan_window(0, budget_bytes, (), shape)


def plan_pool(
    args: Any, configurator: Any, budget_bytes: int, stock_tokens: int
) -> StreamPlan | None:
    """The sizes of the pool; None if ``auto`` finds that no window is worth having.

    budget_bytes: for KV. stock_tokens: of the pool that SGLang would make of it, within
    ``--max-total-tokens``. `check_room` has found room.

    Raises SwiftCacheError for a window that leaves no regular slots.
    """
    shape = shape_of(configurator)
    donated = offered_bytes(
        parse_specs(args.swiftcache_donors),
        Path(args.swiftcache_runtime_dir),
        Settings.from_env(),
    )
    if args.swiftcache_layer_stream == AUTO:
        # the same bytes as without a window, whether the flag or the memory set them
        local_bytes = min(budget_bytes, stock_tokens * shape.regular_slot_bytes)
        context = int(configurator.model_config.context_len)
        plan = plan_auto(local_bytes, donated, context, shape)
        if not plan.is_worth_having(stock_tokens):
            logger.info(
                "SwiftCache layer stream, auto: no window: with what donors lend there would be "
                "room for %d tokens, and without it there is for %d",
                plan.total_tokens,
                stock_tokens,
            )
            return None
        logger.info("SwiftCache layer stream, auto: %s", plan)
        return plan
    plan = plan_window(int(args.swiftcache_layer_stream), budget_bytes, donated, shape)
    if args.max_total_tokens is not None:
        limit = regular_tokens_for(args.max_total_tokens, shape)
        plan = replace(plan, regular_tokens=min(plan.regular_tokens, limit))
    logger.info("SwiftCache layer stream: %s", plan)
    return plan
