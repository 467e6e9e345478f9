"""What the hooks of lending call: each does nothing to a server that does not lend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.swiftcache import donate_checks
from sglang.srt.swiftcache.one_line_exit import one_line_exit

if TYPE_CHECKING:
    from sglang.srt.swiftcache.donation import Donation


def donation_of(allocates: Any) -> Donation | None:
    """What a scheduler, or what it admits by, lends of its own memory; None if it does not."""
    return getattr(allocates.token_to_kv_pool_allocator, "donation", None)


def serve_as_donor(original: Callable[[Any], None], scheduler: Any) -> None:
    """Scheduler.run_event_loop: a donor beside it, for as long as it runs."""
    if not donate_checks.is_on(scheduler.server_args):
        original(scheduler)
        return
    from sglang.srt.swiftcache.donation import Donation

    with one_line_exit():
        donation = Donation(scheduler)
    try:
        original(scheduler)
    finally:
        donation.close()


def lend_and_take_back(
    original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any
) -> Any:
    """Scheduler.get_next_batch_to_run: once a step, and no decode that memory is awaited for."""
    donation = donation_of(scheduler)
    if donation is not None:
        donation.step(running_batch, last_batch)
        if donation.holds_decode(running_batch, last_batch):
            from sglang.srt.managers.schedule_batch import NextBatchPlan

            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
    return original(scheduler, running_batch=running_batch, last_batch=last_batch)


def hold_admission(
    donation: Donation,
    original: Callable[..., Any],
    adder: Any,
    request: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """PrefillAdder.add_one_req: no prefill that memory is awaited for, nor any behind it."""
    donation.note_use(request)
    if donation.holds_prefill(adder, request):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.OTHER
    return original(adder, request, *args, **kwargs)


def store_by_pages(original: Callable[[Any], bool], forward_batch: Any) -> bool:
    """enable_fused_set_kv_buffer: not into pages. The kernels that rotate and store in one write
    the tokens of a layer side by side."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return getattr(get_token_to_kv_pool(), "page_map", None) is None and original(forward_batch)


def leave_lent_out_of_usage(stats: Any, observer: Any) -> Any:
    """SchedulerPoolStatsObserver._get_token_info: of what is the server's own now."""
    held = getattr(observer.token_to_kv_pool_allocator, "held_tokens", 0)
    if not held:
        return None
    used = stats.full_num_used - held
    owned = max(1, observer.max_total_num_tokens - held)
    return dataclasses.replace(stats, full_num_used=used, full_token_usage=used / owned)


def account_for_lent(
    original: Callable[..., Any], checker: Any, stats: Any, uncached: int = 0
) -> Any:
    """SchedulerInvariantChecker._check_full_pool: lent pages count as held."""
    held = getattr(checker.token_to_kv_pool_allocator, "held_tokens", 0)
    return original(checker, stats, uncached + held)
