"""What becomes of requests while donors back less of the window than SGLang was told of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.common import release_kv_cache

from sglang.srt.swiftcache.aborting import abort
from sglang.srt.swiftcache.request_needs import tokens_in_all
from swiftcache_tier.sizes import format_size

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache


class Shortage:
    """Retired pages leave SGLang's count of free slots, but not what it has promised.

    A prefill in chunks was promised slots that may be gone before its next chunk: it starts over,
    as a decode does that SGLang retracts. A request that needs more than is backed at all waits
    for donors, without holding up others, and is refused after ``window_wait_s``. Scheduler
    thread only.
    """

    def __init__(self, cache: StreamRadixCache) -> None:
        self._cache = cache
        self._wait_s = cache.tier_pool.settings.window_wait_s
        self._stopped: list[Req] = []
        self._short_since_s: dict[str, float] = {}
        self._retired = 0

    @property
    def backed_tokens(self) -> int:
        """Slots that are free or hold something."""
        allocator = self._cache.allocator
        size: int = allocator.size
        return size - allocator.book.retired * self._cache.page_size

    def is_beyond(self, req: Req) -> bool:
        """Whether a request could not be admitted though nothing else ran, for want of donors."""
        backed = self.backed_tokens
        return backed < self._cache.allocator.size and self._need(req) >= backed

    def may_go_on(self, adder: Any, req: Req) -> bool:
        """Whether there is room for the next chunk of a prefill, whose last one is in the tree.

        And for a decode step of those that run, which may share its forward. ``adder``: SGLang's
        PrefillAdder, about to take the chunk without looking.
        """
        cache = self._cache
        if cache.stranded([req]) is not None:
            return False
        left = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        pages = -(-min(left, adder.rem_chunk_tokens) // cache.page_size)
        need = pages * cache.page_size
        if adder.running_batch.reqs:  # SGLang's empty batch knows no allocator
            need += adder.running_batch.new_tokens_required_next_decode()
        room: int = cache.allocator.available_size() + cache.evictable_size()
        return need <= room

    def stop(self, req: Req) -> None:
        """Take a prefill's slots from it; `step` puts it back into the queue.

        Not before the queue has been looked through: its last chunk may be in flight, and SGLang
        tells the result of one that was retracted from that of one that runs again only then.
        """
        release_kv_cache(req, self._cache, is_insert=False)
        self._cache.retire_lost_pages()
        req.reset_for_retract()
        self._stopped.append(req)

    def step(self, scheduler: Any, running_batch: Any, now_s: float) -> None:
        """After SGLang has looked through its queue."""
        stopped, self._stopped = self._stopped, []
        for req in stopped:
            self._cache.homes.retracted += 1
            requeue(scheduler, req)
        before, self._retired = self._retired, self._cache.allocator.book.retired
        if self._retired < before:
            running_batch.batch_is_full = False  # for what is back now, admission was closed
        beyond = []
        if self._retired:
            backed = self.backed_tokens
            beyond = [req for req in scheduler.waiting_queue if self._need(req) >= backed]
        known = self._short_since_s
        self._short_since_s = {req.rid: known.get(req.rid, now_s) for req in beyond}
        for req in beyond:
            if now_s - self._short_since_s[req.rid] >= self._wait_s:
                abort(scheduler, req, self._why_not(req))

    def _need(self, req: Req) -> int:
        return tokens_in_all(req, self._cache.page_size)

    def _why_not(self, req: Req) -> str:
        block_bytes = self._cache.tier_pool.block_layout.block_bytes
        return (
            f"the request needs {self._need(req)} tokens of KV slots and {self.backed_tokens} of "
            f"this server's {self._cache.allocator.size} have memory: donors lent "
            f"{format_size(self._retired * block_bytes)} too little for the layer window for "
            f"{self._wait_s:g} s; see `swiftcache status`, lend more, and try again later"
        )


def requeue(scheduler: Any, req: Req) -> None:
    """Put a request that lost its slots back into the queue, and count it as SGLang does."""
    reporter = scheduler.metrics_reporter
    reporter.num_retracted_reqs += 1
    if reporter.enable_metrics:
        reporter.metrics_collector.increment_retracted_reqs(
            num_retracted_reqs=1,
            num_retracted_input_tokens=len(req.origin_input_ids),
            num_retracted_output_tokens=len(req.output_ids),
        )
    scheduler._add_request_to_queue(req, is_retracted=True)
