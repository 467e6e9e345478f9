"""What the watchdog takes for a stall, and what not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang.srt.swiftcache.watchdog import LOOKS_PER_STALL, Watchdog
from support.kv_tree import Tree
from support.processes import wait_until
from support.stream_tree import StreamTree

DEADLINE_S = 60.0
STALL_S = 0.05


class Scheduler:
    """One with a request that waits and is never taken up."""

    def __init__(self, tree: Tree | StreamTree, prompt_tokens: int = 1) -> None:
        self.paused = False
        self.looks = 0
        self.waiting_queue = [
            SimpleNamespace(
                rid="r",
                origin_input_ids=[1] * prompt_tokens,
                output_ids=[],
                sampling_params=SimpleNamespace(max_new_tokens=4),
            )
        ]
        self.running_batch = SimpleNamespace(reqs=[], is_empty=lambda: True)
        self.last_batch = self.cur_batch_for_debug = self.chunked_req = None
        self.forward_ct = 7
        self.max_total_num_tokens = tree.cache.token_to_kv_pool_allocator.size

    @property
    def _engine_paused(self) -> bool:
        self.looks += 1
        return self.paused


def test_nothing_stalls_while_the_engine_is_paused(caplog: pytest.LogCaptureFixture) -> None:
    tree = Tree(page_size=4, pages=16, policy="write_through")
    scheduler = Scheduler(tree)
    scheduler.paused = True
    watchdog = Watchdog(scheduler, tree.cache, STALL_S)
    watchdog.step()
    wait_until(lambda: scheduler.looks > 3 * LOOKS_PER_STALL, DEADLINE_S, "it has looked", 0.01)
    assert watchdog.stalls == 0

    def is_reported() -> bool:
        watchdog.step()
        return "no progress for 0.05 s of requests, with work waiting" in caplog.text

    scheduler.paused = False
    wait_until(is_reported, DEADLINE_S, "a request still waits when the engine goes on", 0.01)
    scheduler.paused = True  # for the thread, which nothing ends


def test_requests_that_wait_for_donors_are_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    """They are refused in time, one after another, and no forward runs meanwhile."""
    extents = 48
    tree = StreamTree(2, 6, donor_extents=extents)
    tree.tier.ask_back(1, range(extents))
    tree.cache.check_hicache_events()
    scheduler = Scheduler(tree, prompt_tokens=60)
    watchdog = Watchdog(scheduler, tree.cache, STALL_S)

    def has_looked() -> bool:
        watchdog.step()
        return scheduler.looks > 3 * LOOKS_PER_STALL

    def is_reported() -> bool:
        watchdog.step()
        return "no progress for 0.05 s of requests" in caplog.text

    wait_until(has_looked, DEADLINE_S, "it has looked", 0.01)
    assert not is_reported()
    tree.tier.join(2, extents)
    tree.cache.check_hicache_events()
    wait_until(is_reported, DEADLINE_S, "donors are back, and it still waits", 0.01)
    scheduler.paused = True  # for the thread, which nothing ends
