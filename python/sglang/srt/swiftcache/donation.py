"""``Donation``: a server lends its own KV memory while it is idle, and takes it back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang.srt.swiftcache import donate_checks
from sglang.srt.swiftcache.aborting import abort
from sglang.srt.swiftcache.cold_prefixes import ColdPrefixes
from sglang.srt.swiftcache.compaction import Compactor
from sglang.srt.swiftcache.donation_metrics import DonationMetrics
from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from sglang.srt.swiftcache.forward_fence import ForwardFence
from sglang.srt.swiftcache.request_needs import (
    decoding_next,
    match_waiting,
    tokens_in_all,
    tokens_needed,
    tokens_of_waiting,
)
from swiftcache_tier.donor.elastic import ElasticDonor
from swiftcache_tier.donor.plan import plan_pool_donor
from swiftcache_tier.donor.water import Levels
from swiftcache_tier.extents.neighbours import side_by_side
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)

# Looking for what is cold and for extents to lend, and emptying some, takes no more of a busy
# scheduler's time.
LENDING_SHARE = 0.05


@dataclass
class DonationTotals:
    """Since the start."""

    lent_extents: int = 0
    returned_extents: int = 0
    take_backs: int = 0
    take_back_seconds: float = 0.0
    """From asking to having all that was asked for."""
    held_prefills: int = 0
    held_decodes: int = 0
    """Of scheduler steps, what waited for memory on its way back."""
    aborted_requests: int = 0


@dataclass
class _Scrub:
    """Extents that are being zeroed before they are lent."""

    slots: list[int]
    is_done: Callable[[], bool]


class Donation:
    """Decides, at every scheduler step, what is lent and what is asked back.

    Scheduler thread only, between two batches: outside of SGLang's free groups, and when no prefix
    has been matched yet for the batch to come.
    """

    def __init__(self, scheduler: Any) -> None:
        """Raises SwiftCacheError when receivers could not find the donor."""
        args = scheduler.server_args
        self.totals = DonationTotals()
        self._scheduler = scheduler
        self._settings = settings = Settings.from_env()
        self._marks = donate_checks.water_marks(args)
        self._allocator: ElasticAllocator = scheduler.token_to_kv_pool_allocator
        self._pool: ElasticKVPool = self._allocator.get_kvcache()
        self._map = self._pool.page_map
        self._allocator.donation = self
        self._fence = ForwardFence(scheduler.forward_stream, self._allocator.device)
        self._cold = ColdPrefixes(scheduler.tree_cache, self._allocator, settings)
        self._compactor = Compactor(self._cold, self._allocator, self._fence, settings)
        self._lent: set[int] = set()
        """Extents that are not this engine's to use: lent, or being scrubbed for it."""
        self._scrubbing: list[_Scrub] = []
        self._aim = 0
        """Extents that are meant to be lent; what the donor has beyond them is asked back."""
        self._asked_s: float | None = None
        """Since when something that was asked back has been missing."""
        self._came_back = 0
        """Extents, since then."""
        self._short_s: float | None = None
        """Since when the queue's head has needed more than is this engine's own."""
        self._evicted_before = 0
        """Tokens that loans had cost when nothing was lent any more."""
        self._quiet_until_s = 0.0
        self._work_after_s = 0.0
        self._matched_s = 0.0
        paths = donate_checks.own_donor(args)
        assert paths is not None, "the server does not lend"
        self._plan = plan_pool_donor(self._pool.memory, paths, settings)
        self._rehearse()
        self._donor = ElasticDonor(self._plan, self._pool.memory, settings)
        self._donor.start()
        self._metrics = None
        if args.enable_metrics:
            labels = args.extra_metric_labels or {}
            self._metrics = DonationMetrics(
                self._plan.paths.name, labels, settings.metrics_interval_s
            )
        logger.info(
            "SwiftCache: lends from %s of KV memory as %s",
            format_size(self._plan.size_bytes),
            self._plan.paths.spec,
        )

    def step(self, running_batch: Any, last_batch: Any) -> None:
        """Take in what came back, hand over what was scrubbed, then lend or ask back."""
        now_s = time.monotonic()
        self._take_in(running_batch, now_s)
        self._hand_over()
        if self._metrics is not None:
            self._metrics.step(self._donor.handed_over, self._plan.extents, self._counts)
        self._abort_what_cannot_fit(running_batch, now_s)
        if not (self._lent or self._donor.demand):
            return
        decoding = decoding_next(self._scheduler, running_batch, last_batch)
        busy = decoding or self._scheduler.waiting_queue or self._scheduler.chunked_req
        has_time = not busy or now_s >= self._work_after_s
        if has_time:
            self._cold.look(now_s)
        levels = self._levels(decoding, now_s)
        self._ask_back(levels, now_s)
        if has_time:
            self._lend(levels, now_s)
            self._work_after_s = now_s + (time.monotonic() - now_s) / LENDING_SHARE

    def note_use(self, request: Any) -> None:
        """The prefix that a request has just matched is not cold any more."""
        self._cold.note_use(request.last_node)

    def holds_decode(self, running_batch: Any, last_batch: Any) -> bool:
        """Whether the next step is not to be taken yet: it would evict or retract what is hot."""
        if not self._awaits() or running_batch.is_empty() or self._scheduler.chunked_req:
            return False
        if last_batch is not None and last_batch.forward_mode.is_extend():
            return False  # has yet to be merged into the running batch
        needed = running_batch.new_tokens_required_next_decode()
        holds: bool = needed > self._allocator.available_size() + self._cold_now()
        if holds and self._scheduler.enable_hierarchical_cache:
            # A server that waits for others must go on giving back what it has of theirs, as it
            # does before it looks for a prefill.
            self._scheduler.tree_cache.check_hicache_events()
        self.totals.held_decodes += holds
        return holds

    def holds_prefill(self, adder: Any, request: Any) -> bool:
        """Whether a request waits for memory on its way back, rather than have what is hot evicted.

        ``adder``: SGLang's PrefillAdder, whose ``rem_total_tokens`` are free or evictable, and not
        reserved for those that run or were admitted before.
        """
        if not self._awaits():
            return False
        hot = self._scheduler.tree_cache.evictable_size() - self._cold_now()
        needed = tokens_of_waiting(request, self._allocator.page_size)
        holds: bool = needed >= adder.rem_total_tokens - hot
        self.totals.held_prefills += holds
        return holds

    def close(self) -> None:
        """Ask everything back and end; what is not back in time stays with its receivers."""
        if not self._donor.stop():
            logger.error("SwiftCache: the donor's thread did not end")

    def status(self) -> dict[str, Any]:
        """Plain data for ``/server_info``."""
        reply = self._donor.status()
        cost = self._compactor.totals
        gib_emptied = cost.emptied_extents * self._map.extent_bytes / (1 << 30)
        evicted = cost.evicted_tokens - self._evicted_before
        cached = self._scheduler.tree_cache.evictable_size()
        cached += self._scheduler.tree_cache.protected_size()
        return {
            "name": self._plan.paths.name,
            "state": "starting" if reply is None else reply.state,
            "extent_bytes": self._map.extent_bytes,
            "extents": {} if reply is None else reply.extents,
            "lent_bytes": self._donor.handed_over * self._map.extent_bytes,
            "aim_bytes": self._aim * self._map.extent_bytes,
            "owned_tokens": self._allocator.size - self._allocator.held_tokens,
            "receivers": [] if reply is None else [r.name for r in reply.receivers],
            **self._counts(),
            "cached_tokens": cached,
            "evicted_share": round(evicted / (evicted + cached), 6) if evicted else 0.0,
            "compaction_seconds": round(cost.seconds, 6),
            "compaction_seconds_per_gib": round(cost.seconds / gib_emptied, 6)
            if gib_emptied
            else 0.0,
        }

    def _counts(self) -> dict[str, float]:
        """Since the start, for ``/server_info`` and ``/metrics``."""
        totals, cost = self.totals, self._compactor.totals
        return {
            "lent_extents": totals.lent_extents,
            "returned_extents": totals.returned_extents,
            "take_backs": totals.take_backs,
            "take_back_seconds": round(totals.take_back_seconds, 6),
            "held_prefills": totals.held_prefills,
            "held_decodes": totals.held_decodes,
            "aborted_requests": totals.aborted_requests,
            "evicted_tokens": cost.evicted_tokens,
            "moved_pages": cost.moved_pages,
        }

    def _take_in(self, running_batch: Any, now_s: float) -> None:
        slots = self._donor.take_returned()
        if slots:
            self._lent.difference_update(slots)
            if not self._lent:
                self._evicted_before = self._compactor.totals.evicted_tokens
            self._allocator.release(slots)
            # Queued on the stream on which their pages are handed out, so before any use of them.
            self._pool.zero_extents(slots)
            self.totals.returned_extents += len(slots)
            self._came_back += len(slots)
            running_batch.batch_is_full = False
        # Of a donor that has failed nothing more comes back, asked for or not.
        self._aim = 0 if self._has_failed() else min(self._aim, self._donor.handed_over)
        # What is stuck may never come, and all else goes on without it.
        if self._asked_s is not None and not self._awaited():
            spent_s, self._asked_s = now_s - self._asked_s, None
            self.totals.take_back_seconds += spent_s
            self._quiet_until_s = now_s + self._settings.lend_quiet_s
            logger.info(
                "SwiftCache: took %s back in %.1f ms, %s missing",
                format_size(self._came_back * self._map.extent_bytes),
                spent_s * 1e3,
                format_size((self._donor.handed_over - self._aim) * self._map.extent_bytes),
            )

    def _hand_over(self) -> None:
        while self._scrubbing and self._scrubbing[0].is_done():
            slots = self._scrubbing.pop(0).slots
            # What is on its way back stays so.
            self._aim = max(self._aim, self._stuck()) + len(slots)
            self._donor.lend(slots, self._aim)
            self.totals.lent_extents += len(slots)

    def _ask_back(self, levels: Levels, now_s: float) -> None:
        extents = self._marks.to_take_back(
            levels,
            self._map.extent_pages,
            self._donor.handed_over - self._stuck(),
            self._awaited(),
        )
        if extents <= 0:
            return
        self._aim -= extents
        self._donor.aim(self._aim)
        self._quiet_until_s = now_s + self._settings.lend_quiet_s
        if self._asked_s is None:
            self._asked_s = now_s
            self._came_back = 0
            self.totals.take_backs += 1

    def _lend(self, levels: Levels, now_s: float) -> None:
        demand = self._donor.demand - sum(len(scrub.slots) for scrub in self._scrubbing)
        if demand <= 0 or self._asked_s is not None or now_s < self._quiet_until_s:
            return
        most = max(1, self._settings.offer_bytes_max // self._map.extent_bytes)
        extents = min(
            most, self._marks.to_lend(levels, self._map.extent_pages, len(self._lent), demand)
        )
        if extents == 0:
            return
        slots = self._wholly_free(extents)
        if len(slots) < extents:
            self._compactor.empty(extents - len(slots), self._lent.union(slots))
            slots = self._wholly_free(extents)
        if slots:
            self._allocator.hold(slots)
            self._lent.update(slots)
            self._scrubbing.append(
                _Scrub(slots, self._fence.queue(lambda: self._pool.zero_extents(slots)))
            )
            self._hand_over()

    def _rehearse(self) -> None:
        """Go through a lend and a take-back once while nothing runs yet.

        A GPU loads each kernel at its first use, which the first lend would wait for.
        """
        slots = self._wholly_free(1)
        self._allocator.hold(slots)
        self._fence.queue(lambda: self._pool.zero_extents(slots))
        self._allocator.release(slots)
        self._pool.zero_extents(slots)

    def _wholly_free(self, extents: int) -> list[int]:
        """Extents that could be lent now: beside those that are, if there are any."""
        costs = np.full(self._map.extents, np.inf)
        costs[self._map.wholly_free(self._allocator.free_mask(), self._lent)] = 0.0
        return side_by_side(costs, self._lent, extents, worth=1.0)

    def _levels(self, decoding: list[Any], now_s: float) -> Levels:
        page_size = self._allocator.page_size
        again = now_s - self._matched_s >= self._settings.cold_scan_s
        if again:
            self._matched_s = now_s
        match_waiting(self._scheduler, again)
        capacity = self._map.pages - 1
        needed = tokens_needed(self._scheduler, decoding)
        return Levels(
            capacity=capacity,
            free=self._allocator.available_size() // page_size,
            cold=self._cold_now() // page_size,
            # Where exactly as much is free, SGLang does not admit.
            needed=min(needed // page_size + 1, capacity) if needed else 0,
        )

    def _cold_now(self) -> int:
        """Cold tokens that could be evicted: by another policy than LRU, some may be gone."""
        evictable: int = self._scheduler.tree_cache.evictable_size()
        return min(self._cold.tokens, evictable)

    def _awaited(self) -> int:
        """Extents that are on their way back.

        The donor counts what is stuck into what is to stay lent, whyever it is, and has others
        give back in its place.
        """
        return max(0, self._donor.handed_over - max(self._aim, self._stuck()))

    def _stuck(self) -> int:
        """Extents of receivers that do not answer, or not in time."""
        reply = self._donor.status()
        if reply is None:
            return 0
        return reply.extents["degraded"] + reply.extents["orphaned"]

    def _has_failed(self) -> bool:
        reply = self._donor.status()
        return reply is not None and reply.state == "failed"

    def _awaits(self) -> bool:
        """Whether memory is on its way back that is worth waiting for."""
        if self._asked_s is None or not self._awaited():
            return False
        return time.monotonic() - self._asked_s < self._settings.take_back_wait_s

    def _abort_what_cannot_fit(self, running_batch: Any, now_s: float) -> None:
        """End requests that only memory could serve which its holders do not return.

        Nothing else runs then, so a request has all that is owned, and its cached prefix lies in
        that.
        """
        scheduler, page_size = self._scheduler, self._allocator.page_size
        queue = scheduler.waiting_queue
        owned = self._allocator.size - self._allocator.held_tokens
        if not queue or tokens_in_all(queue[0], page_size) < owned:
            self._short_s = None
            return
        if self._short_s is None:
            self._short_s = now_s
        stuck = self._stuck()
        late = self._has_failed() or now_s - self._short_s >= self._settings.reclaim_deadline_s
        if not (stuck and late) or scheduler.chunked_req or not running_batch.is_empty():
            return
        others = max(0, len(self._lent) - stuck)
        at_most = owned + int(others * self._map.extent_pages) * page_size
        while scheduler.waiting_queue:
            head = scheduler.waiting_queue[0]
            if tokens_in_all(head, page_size) < at_most:
                return
            abort(scheduler, head, self._why_not(head, owned))
            self.totals.aborted_requests += 1
            running_batch.batch_is_full = False  # for it, admission was closed

    def _why_not(self, request: Any, owned: int) -> str:
        needed = tokens_in_all(request, self._allocator.page_size)
        if self._has_failed():
            why = "and lending has failed: start the server again"
        else:
            why = (
                f"and was not given back within {self._settings.reclaim_deadline_s:g} s; see "
                f"`swiftcache status`, and try again later"
            )
        return (
            f"the request needs more than {needed} tokens of KV and {owned} of this server's "
            f"{self._allocator.size} are its own now: the rest is lent {why}"
        )
