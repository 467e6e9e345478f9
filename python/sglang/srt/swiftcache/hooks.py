"""Every hook on SGLang, in one list.

Each entry says what it is for and what to check when the pinned version moves; what it does is
written with the part that it serves. They are installed through SGLang's own registry, which only
logs a hook that failed; ``startup_check`` turns that into a server that does not start. A hook does
nothing unless ``--swiftcache-donors`` or ``--swiftcache-donate`` is given.

Every process of a server imports this list, and ``--help`` does: the wrappers import what is heavy
when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

from sglang.srt.swiftcache import (
    admission_wiring,
    donate_checks,
    donation_wiring,
    model_check,
    one_line_exit,
    pool_wiring,
    tier_wiring,
    ttft,
)
from sglang.srt.swiftcache.layer_stream import wiring as stream_wiring


class Hook(NamedTuple):
    """One wrapped function of SGLang.

    Attributes:
        target: dotted path of the function.
        wrapper: called by the registry as ``kind`` says.
        reason: why no public extension point does.
        on_upgrade: what to look at when the pinned SGLang version changes.
    """

    target: str
    kind: HookType
    wrapper: Callable[..., Any]
    reason: str
    on_upgrade: str


HOOKS = (
    Hook(
        "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
        HookType.BEFORE,
        model_check.refuse_uncovered_model,
        reason="SGLang adjusts itself to some model families, and fails on them, before the model "
        "is known to anyone else",
        on_upgrade="still the first to read the model's config, with model_path resolved",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs._handle_page_major_kv_layout",
        HookType.AROUND,
        donate_checks.lay_out_by_pages,
        reason="the flag turns the page-major layout on, also on the CPU, which SGLang refuses",
        on_upgrade="runs after the attention backends are resolved; which backends it allows",
    ),
    Hook(
        "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        HookType.AROUND,
        one_line_exit.end_as_scheduler,
        reason="the main process raises an error of its own, with a traceback and exit code 1, "
        "where a scheduler has ended after one line on what the user is to change",
        on_upgrade="still raises RuntimeError, after it has joined the process that ended",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mha_kv_pool",
        HookType.AROUND,
        pool_wiring.build_pool,
        reason="SGLang names the pool's class itself: one for a server that lends, another for "
        "one with a layer window",
        on_upgrade="still builds plain MHA pools only, mha_pool_class(size, page_size=, ...)",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
        "._build_token_to_kv_pool_allocator",
        HookType.AROUND,
        pool_wiring.build_allocator,
        reason="SGLang names the allocator's class itself",
        on_upgrade="still builds a PagedTokenToKVPoolAllocator, from which nothing is allocated "
        "before it returns; all arguments by keyword, with token_to_kv_pool and "
        "req_to_token_pool; the methods of it that StreamAllocator overrides, and the order in "
        "which its kernels take from free_pages",
    ),
    Hook(
        "sglang.srt.models.utils.enable_fused_set_kv_buffer",
        HookType.AROUND,
        donation_wiring.store_by_pages,
        reason="models that rotate and store K in one kernel, as Qwen3-MoE does, do not ask how "
        "the pool is laid out",
        on_upgrade="still asked by such models, once for the kernel and once for save_kv_cache; "
        "whether SGLang itself knows page-major pools there",
    ),
    Hook(
        "sglang.srt.mem_cache.pool_host.mha.get_mha_host_pool_cls",
        HookType.AROUND,
        tier_wiring.host_pool_class,
        reason="HiRadixCache builds its host pool itself, from the class this function names",
        on_upgrade="HiRadixCache.__init__: still calls it, with (pool, ratio, size, page_size, "
        "layout, allocator_type=)",
    ),
    Hook(
        "sglang.srt.managers.cache_controller.HiCacheController.move_indices",
        HookType.AROUND,
        tier_wiring.keep_donor_indices,
        reason="donor blocks are looked up on the host: their indices must not go to the GPU, from "
        "where reading them back would wait for it",
        on_upgrade="still the only place where start_loading moves indices; write still queues on "
        "write_queue and calls start_writing, in whose place Stores begins stores by its own",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        HookType.AFTER,
        tier_wiring.add_state,
        reason="/server_info has no place for a cache backend's own state",
        on_upgrade="still returns an output whose internal_state is a plain dict",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        HookType.AFTER,
        tier_wiring.count_prefix_sources,
        reason="only here is it known which tier each request's prefix came from",
        on_upgrade="still sets req.cached_tokens_device / _host on a request's first chunk",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_watch_dog_memory_saver_input_blocker",
        HookType.AFTER,
        tier_wiring.watch_scheduler,
        reason="the cache backend is not given the scheduler, whose queues the watchdog reads",
        on_upgrade="called on the scheduler thread with the tree cache in place; state_dump reads "
        "running_batch, last_batch, result_queue, chunked_req, waiting_queue and forward_ct",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_input_requests",
        HookType.AFTER,
        tier_wiring.follow_donors_while_paused,
        reason="the event loops leave out everything else while the engine is paused, and donors "
        "want memory back then too",
        on_upgrade="still called at every turn, before _engine_paused skips the rest; nothing is "
        "half done between it and get_new_batch_prefill",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_metric_collector_watchdog",
        HookType.AFTER,
        ttft.register,
        reason="a histogram of the HTTP process must exist before the first request",
        on_upgrade="still called once, by the constructor, after PROMETHEUS_MULTIPROC_DIR is set",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        HookType.BEFORE,
        ttft.mark_warm_up,
        reason="the server's warm-up looks like any other request, and is not to be counted",
        on_upgrade="still called with the fastapi request by HTTP endpoints only; server_status is "
        "Starting until the warm-up is over",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.collect_metrics",
        HookType.AROUND,
        ttft.observe,
        reason="only the HTTP process knows the time to first token that the client sees",
        on_upgrade="still sets state.ttft_observed at the first token; recv_obj.rids exists",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.config_from_budget",
        HookType.AROUND,
        stream_wiring.size_pool,
        reason="the pool reports R + W tokens, of which the budget pays for R and two sets of W",
        on_upgrade="still the one place that turns bytes into max_total_num_tokens",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool",
        HookType.AFTER,
        stream_wiring.attach_streamer,
        reason="model.forward must be wrapped when the pool exists and no graph is captured yet",
        on_upgrade="still between load_model and the capture of graphs; runners call model.forward",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.init_attention_backends",
        HookType.AFTER,
        stream_wiring.follow_attention,
        reason="the pool sees when a layer is first touched, not when its attention is queued",
        on_upgrade="still sets attn_backend, whose forward the attention layers call, before any "
        "graph is captured",
    ),
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        HookType.AROUND,
        stream_wiring.run_forward,
        reason="the plan goes up on the forward's stream, before a graph is replayed",
        on_upgrade="still called on the forward stream, for graphs and eager forwards alike",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        HookType.AROUND,
        stream_wiring.run_batch,
        reason="the last place before a forward where the requests of the batch are known",
        on_upgrade="still launches the forward; seq_lens_cpu counts the new tokens",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.alloc_for_extend",
        HookType.AROUND,
        stream_wiring.alloc_for_extend,
        reason="which request gets which pages is known here alone without reading the device",
        on_upgrade="still allocates in the order of batch.reqs, with req_pool_idx assigned",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.alloc_for_decode",
        HookType.AROUND,
        stream_wiring.alloc_for_decode,
        reason="as above",
        on_upgrade="still one token each, in the order of batch.reqs, before seq_lens grow",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        HookType.AROUND,
        admission_wiring.add_one_req,
        reason="SGLang counts slots of both kinds as one, and a request that streams slows all "
        "others; and one waits for lent memory on its way back, rather than have a hot prefix "
        "evicted",
        on_upgrade="still asked of each request before it is admitted; after OTHER the queue stays "
        "as it is, and open, and after CONTINUE the next one is asked; rem_total_tokens still "
        "counts all that is evictable, and rem_total_token_offset what is reserved",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        HookType.AROUND,
        stream_wiring.add_chunked_req,
        reason="what was promised to a prefill in chunks may be gone with a donor, and SGLang ends "
        "when a chunk finds no room",
        on_upgrade="None still means that no prefill goes on; the last chunk has been stashed; "
        "process_pending_chunked_abort still releases a request at this point, whose last chunk "
        "may be in flight",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        HookType.AFTER,
        stream_wiring.after_admission,
        reason="the adder has no queue to put a stopped prefill into; and once a step, to refuse "
        "who has waited too long for donors",
        on_upgrade="called at every step, idle ones too; returns a plan with running_batch; the "
        "result of a request with is_retracted is still dropped",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        HookType.AROUND,
        stream_wiring.retract_decode,
        reason="SGLang aborts the last request that finds no room, for which donors may come",
        on_upgrade="still (retracted, new_token_ratio, to_abort), all released; to_abort differs "
        "in to_finish alone",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        HookType.AROUND,
        stream_wiring.update_running_batch,
        reason="where SGLang retracts for want of memory, requests are retracted for lost homes",
        on_upgrade="its own retraction: release_req, filter_batch, _add_request_to_queue",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
        "capture_one_shape",
        HookType.AROUND,
        stream_wiring.capture_shape,
        reason="each decode graph is captured with the copies and without",
        on_upgrade="still captures one graph under the key of (size, stream, variant_label)",
    ),
    Hook(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner."
        "_make_graph_key",
        HookType.AROUND,
        stream_wiring.graph_key,
        reason="chooses between the two at replay",
        on_upgrade="still makes the key at capture and at replay, from the variant's label",
    ),
    Hook(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner."
        "can_run_graph",
        HookType.AROUND,
        tier_wiring.can_run_prefill_graph,
        reason="prefill graphs have no copies in them, and one of the whole forward does not wait "
        "for the loads of its layers",
        on_upgrade="still decides between graph and eager prefill; _is_full_backend still tells "
        "graphs that hold the attention too; set_hicache_consumer still comes before it",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop",
        HookType.AROUND,
        donation_wiring.serve_as_donor,
        reason="the donor is to be found as soon as requests are, and to end with the scheduler",
        on_upgrade="still called once, in the scheduler process, after graphs were captured",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        HookType.AROUND,
        donation_wiring.lend_and_take_back,
        reason="once a step, outside of free groups and before prefixes are matched; and a decode "
        "step that would evict or retract waits for memory on its way back",
        on_upgrade="called at every step, idle ones too, with (running_batch=, last_batch=); what "
        "a plan without a batch does to the event loops",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer"
        ".SchedulerPoolStatsObserver._get_token_info",
        HookType.AFTER,
        donation_wiring.leave_lent_out_of_usage,
        reason="lent pages are not used, and not there to be used",
        on_upgrade="still used = total - available - evictable; who reads full_token_usage",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.invariant_checker"
        ".SchedulerInvariantChecker._check_full_pool",
        HookType.AROUND,
        donation_wiring.account_for_lent,
        reason="lent pages are held, not leaked",
        on_upgrade="still adds `uncached` to what is accounted for, in the idle and the busy check",
    ),
)
