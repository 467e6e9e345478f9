"""What the hooks of the layer stream call: each does nothing to a server without a window."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache.flag_words import OFF
from sglang.srt.swiftcache.one_line_exit import one_line_exit

if TYPE_CHECKING:
    from sglang.srt.swiftcache.layer_stream.streamer import LayerStreamer
    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

logger = logging.getLogger(__name__)

STREAMED_VARIANT = "streamed"

# From `size_pool` to `build_pool`, by the configurator, which has slots and takes no attributes.
_window_tokens: dict[int, int] = {}


def size_pool(
    original: Callable[..., Any], configurator: Any, budget_bytes: int, **kwargs: Any
) -> Any:
    """KVCacheConfigurator.config_from_budget: R + W slots in place of what the budget holds."""
    args = configurator.server_args
    if not layer_stream_is_on(args):
        return original(configurator, budget_bytes, **kwargs)
    from sglang.srt.swiftcache.layer_stream.sizes import check_room, plan_pool

    with one_line_exit():
        check_room(args, configurator, budget_bytes)
        config = original(configurator, budget_bytes, **kwargs)
        plan = plan_pool(args, configurator, budget_bytes, config.max_total_num_tokens)
    if plan is not None:
        _window_tokens[id(configurator)] = plan.window_tokens
        config.max_total_num_tokens = plan.total_tokens
    return config


def build_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """KVCacheConfigurator._build_mha_kv_pool: a pool with a window."""
    window_tokens = _window_tokens.pop(id(configurator), 0)
    if window_tokens == 0:
        return original(configurator, **kwargs)
    from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool

    def with_window(size: int, **settings: Any) -> StreamKVPool:
        return StreamKVPool(size, window_tokens=window_tokens, **settings)

    with one_line_exit():
        return original(configurator, **{**kwargs, "mha_pool_class": with_window})


def build_allocator(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """KVCacheConfigurator._build_token_to_kv_pool_allocator: one that knows the two kinds."""
    from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool

    pool = kwargs["token_to_kv_pool"]
    if not isinstance(pool, StreamKVPool):
        return original(configurator, **kwargs)
    from sglang.srt.swiftcache.layer_stream.allocator import StreamAllocator

    return StreamAllocator(
        pool.size,
        pool.page_size,
        configurator.kv_cache_dtype,
        configurator.device,
        pool,
        need_sort=False,
        req_to_token=kwargs["req_to_token_pool"].req_to_token,
    )


def attach_streamer(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """ModelRunner.alloc_memory_pool: pool and model exist, no graph has been captured yet."""
    from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool

    pool = runner.token_to_kv_pool
    if not isinstance(pool, StreamKVPool):
        return
    from sglang.srt.swiftcache.donor_kv_cache import block_layout
    from sglang.srt.swiftcache.layer_stream.model_layers import check_layers
    from sglang.srt.swiftcache.layer_stream.movers import CudaMover, HostMover, PageMover
    from sglang.srt.swiftcache.layer_stream.streamer import LayerStreamer
    from swiftcache_kernel import PoolBuffers

    with one_line_exit():
        check_layers(runner.model, pool.layer_num)
    buffers = PoolBuffers(block_layout(pool), pool.k_buffer, pool.v_buffer)
    mover: PageMover
    if buffers.device.type == "cpu":
        mover = HostMover(buffers)
    else:
        mover = CudaMover(buffers, pool.window_tokens // pool.page_size)
    pool.streamer = LayerStreamer(mover, pool.layer_num)
    # on the instance: the runners call `model.forward`, in captures too
    runner.model.forward = pool.streamer.wrap_model(runner.model.forward)


def follow_attention(_: Any, runner: Any) -> None:
    """ModelRunner.init_attention_backends: the streamer hears when attention is queued."""
    streamer = _streamer_of(runner)
    if streamer is not None:
        # on the instance: the attention layers call it, in captures too
        backend = runner.attn_backend
        first_layer = runner.token_to_kv_pool.start_layer
        backend.forward = streamer.wrap_attention(backend.forward, first_layer)


def run_forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """ModelRunner.forward, on the forward's stream."""
    streamer = _streamer_of(runner)
    if streamer is None:
        return original(runner, *args, **kwargs)
    with streamer.forward():
        return original(runner, *args, **kwargs)


def run_batch(
    original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Scheduler.run_batch: the batch's pages are known, nothing of it has been launched."""
    cache = _stream_cache(scheduler.tree_cache)
    if cache is None:
        return original(scheduler, batch, *args, **kwargs)
    with cache.streamer.planned(cache.plan(batch)):
        return original(scheduler, batch, *args, **kwargs)


def alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """alloc_for_extend: a prefill batch gets its slots."""
    cache = _stream_cache(batch.tree_cache)
    if cache is None:
        return original(batch)
    with cache.allocator.slots_for(batch.reqs):
        slots = original(batch)
    cache.note_extend(batch)
    return slots


def alloc_for_decode(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """alloc_for_decode: a decode batch gets its slots."""
    cache = _stream_cache(batch.tree_cache)
    if cache is None:
        return original(batch, *args, **kwargs)
    with cache.allocator.slots_for(batch.reqs):
        slots = original(batch, *args, **kwargs)
    cache.note_decode(batch)
    return slots


def add_one_req(
    original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any
) -> Any:
    """PrefillAdder.add_one_req: what would stream too much waits, as for want of slots."""
    cache = _stream_cache(adder.tree_cache)
    if cache is None:
        return original(adder, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    if cache.shortage.is_beyond(req):
        return AddReqResult.CONTINUE  # with those behind it
    if not cache.admission.may_run(adder, req):
        # after NO_TOKEN SGLang asks again when a request ends; a copy that ends frees pages too
        copying = cache.ongoing_write_through or cache.ongoing_load_back
        return AddReqResult.OTHER if copying else AddReqResult.NO_TOKEN
    with cache.allocator.slots_for([req]):
        result = original(adder, req, *args, **kwargs)
        # only now: what is promoted is copied when the batch starts that the request is in
        if req in adder.can_run_list:
            cache.promote(req)
    return result


def add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """PrefillAdder.add_chunked_req: SGLang takes the next chunk without looking for room."""
    cache = _stream_cache(adder.tree_cache)
    if cache is None or cache.shortage.may_go_on(adder, req):
        return original(adder, req)
    cache.shortage.stop(req)
    return None


def after_admission(plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Scheduler.get_new_batch_prefill: prefills that were stopped, and who waits for donors."""
    cache = _stream_cache(scheduler.tree_cache)
    if cache is not None:
        cache.shortage.step(scheduler, plan.running_batch, time.monotonic())


def update_running_batch(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """Scheduler.update_running_batch: requests whose pages lose their homes start over."""
    cache = _stream_cache(scheduler.tree_cache)
    if cache is not None:
        place = cache.stranded(batch.reqs)
        if place is not None:
            from sglang.srt.swiftcache.layer_stream.shortage import requeue

            req = batch.reqs[place]
            rest = [i for i in range(len(batch.reqs)) if i != place]
            batch.release_req(place, len(rest), scheduler.server_args)
            cache.retire_lost_pages()
            batch.filter_batch(keep_indices=rest)
            batch.batch_is_full = False
            cache.homes.retracted += 1
            requeue(scheduler, req)
    return original(scheduler, batch)


def retract_decode(original: Callable[..., Any], batch: Any, *args: Any) -> Any:
    """ScheduleBatch.retract_decode: the last request, too, is retracted while donors are missing.

    SGLang aborts it, since nobody else is left who could give it room.
    """
    cache = _stream_cache(batch.tree_cache)
    if cache is None or cache.allocator.book.retired == 0:
        return original(batch, *args)
    endings = {req.rid: req.to_finish for req in batch.reqs}
    retracted, new_token_ratio, to_abort = original(batch, *args)
    for req in to_abort:
        req.to_finish = endings[req.rid]
        logger.warning("SwiftCache: request %s is not aborted: it waits for donors", req.rid)
    cache.homes.retracted += len(to_abort)
    return retracted + to_abort, new_token_ratio, []


def capture_shape(
    original: Callable[..., Any],
    runner: Any,
    size: int,
    forward: Callable[..., Any],
    stream_idx: int | None = None,
    variant_label: str | None = None,
) -> None:
    """DecodeCudaGraphRunner.capture_one_shape: each shape twice, with the copies and without."""
    original(runner, size, forward, stream_idx, variant_label)
    streamer = _streamer_of(runner.model_runner)
    if streamer is not None:
        with streamer.capturing():
            original(runner, size, forward, stream_idx, STREAMED_VARIANT)


def graph_key(
    original: Callable[..., Any],
    runner: Any,
    size: int,
    stream_idx: int | None = None,
    variant_label: str | None = None,
) -> Any:
    """DecodeCudaGraphRunner._make_graph_key: which of the two is replayed."""
    streamer = _streamer_of(runner.model_runner)
    if streamer is not None and streamer.has_plan:
        variant_label = STREAMED_VARIANT
    return original(runner, size, stream_idx, variant_label)


def can_run_prefill_graph(
    original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """PrefillCudaGraphRunner.can_run_graph: a prefill that streams runs without a graph."""
    streamer = _streamer_of(runner.model_runner)
    if streamer is not None and streamer.has_plan:
        return False
    return original(runner, *args, **kwargs)


def layer_stream_is_on(args: Any) -> bool:
    """Whether a server was asked for a layer window. ``args``: ServerArgs."""
    return getattr(args, "swiftcache_layer_stream", OFF) != OFF


def _streamer_of(model_runner: Any) -> LayerStreamer | None:
    return getattr(getattr(model_runner, "token_to_kv_pool", None), "streamer", None)


def _stream_cache(tree_cache: Any) -> StreamRadixCache | None:
    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

    return tree_cache if isinstance(tree_cache, StreamRadixCache) else None
