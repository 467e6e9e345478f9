"""What the hooks of the tier call: each does nothing to a server without donors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.swiftcache.donation_wiring import donation_of
from sglang.srt.swiftcache.layer_stream import wiring as stream_wiring


def host_pool_class(original: Callable[[Any], type], device_pool: Any) -> type:
    """get_mha_host_pool_cls: donor blocks in place of host RAM."""
    from sglang.srt.runtime_context import get_server_args

    if get_server_args().swiftcache_donors is None:
        return original(device_pool)
    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache

    return DonorKVCache


def keep_donor_indices(
    original: Callable[..., Any], controller: Any, host_indices: Any, device_indices: Any
) -> Any:
    """HiCacheController.move_indices: those of donor blocks stay on the host."""
    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache

    if isinstance(controller.mem_pool_host, DonorKVCache):
        return host_indices, device_indices
    return original(controller, host_indices, device_indices)


def count_prefix_sources(_: Any, batch: Any, *__: Any) -> None:
    """ScheduleBatch.prepare_for_extend: each request's prefix has been found."""
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

    if isinstance(batch.tree_cache, DonorRadixCache):
        batch.tree_cache.stats.count_requests(batch.reqs)


def watch_scheduler(_: Any, scheduler: Any) -> None:
    """Scheduler.init_watch_dog_memory_saver_input_blocker: the watchdog gets its queues."""
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

    if isinstance(scheduler.tree_cache, DonorRadixCache):
        scheduler.tree_cache.watch(scheduler)


def follow_donors_while_paused(_: Any, scheduler: Any, *__: Any) -> None:
    """Scheduler.process_input_requests: all that a paused engine does.

    It stands between two steps, as where the scheduler calls ``check_hicache_events`` otherwise:
    a launched forward may still run then too, and what it reads or writes on donors is in transfer.
    """
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

    if scheduler._engine_paused and isinstance(scheduler.tree_cache, DonorRadixCache):
        scheduler.tree_cache.check_hicache_events()


def can_run_prefill_graph(
    original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any
) -> Any:
    """PrefillCudaGraphRunner.can_run_graph: a graph of the whole forward waits for no load.

    By default graphs break at the attention, which then waits for its layer as in eager prefill.
    """
    if _is_loading(runner.model_runner) and runner._is_full_backend:
        return False
    return stream_wiring.can_run_prefill_graph(original, runner, *args, **kwargs)


def _is_loading(model_runner: Any) -> bool:
    """Whether the next forward reads what is being loaded from donors."""
    if model_runner.server_args.swiftcache_donors is None:
        return False
    counter = model_runner.token_to_kv_pool.layer_transfer_counter
    return counter is not None and counter.consumer_index >= 0


def add_state(output: Any, scheduler: Any, *_: Any) -> None:
    """Scheduler.get_internal_state: how the tier stands, and what the server itself lends."""
    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache

    if isinstance(scheduler.tree_cache, DonorRadixCache):
        output.internal_state["swiftcache"] = scheduler.tree_cache.status()
    donation = donation_of(scheduler)
    if donation is not None:
        output.internal_state.setdefault("swiftcache", {})["donation"] = donation.status()
