"""What a scheduler lends and when it asks back; donor and forwards are driven by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang.srt.swiftcache import donation as donation_module
from sglang.srt.swiftcache.donation import Donation
from support.elastic_tree import PAGE_TOKENS, ElasticTree
from swiftcache_tier.donor.water import WaterMarks
from swiftcache_tier.extents.neighbours import runs_of

PAGES = 95  # and page 0: 12 extents of 8 pages
TOKENS = PAGES * PAGE_TOKENS


class DonorByHand:
    """In place of ``ElasticDonor``: receivers want everything, and return what the test says."""

    def __init__(self, plan: Any, memory: Any, settings: Any) -> None:
        self.demand = 99
        self.theirs: list[int] = []
        self.aimed: list[int] = []
        self.targets: list[int] = []
        self.stuck = 0
        self.state = "serving"
        self._back: list[int] = []

    def start(self) -> None:
        pass

    def stop(self) -> bool:
        return True

    @property
    def handed_over(self) -> int:
        return len(self.theirs) + len(self._back)

    def lend(self, slots: list[int], target: int) -> None:
        self.theirs += slots
        self.targets.append(target)

    def aim(self, target: int) -> None:
        self.aimed.append(target)

    def give_back(self, extents: int) -> None:
        self._back += [self.theirs.pop() for _ in range(extents)]

    def take_returned(self) -> list[int]:
        slots, self._back = self._back, []
        return slots

    def status(self) -> Any:
        extents = {"degraded": self.stuck, "orphaned": 0}
        return SimpleNamespace(state=self.state, extents=extents, receivers=[])


class FenceByHand:
    """Forwards in flight that end when the test says."""

    def __init__(self, forward_stream: Any, device: str) -> None:
        self.in_flight: list[Callable[[], None]] = []
        self.open = True

    def launch(self, forward: Callable[[], None]) -> None:
        self.open = False
        self.in_flight.append(forward)

    def queue(self, work: Callable[[], None]) -> Callable[[], bool]:
        if self.open:
            work()
            return lambda: True
        self.in_flight.append(work)
        return lambda: self.open

    def finish(self) -> None:
        for work in self.in_flight:
            work()
        self.in_flight.clear()
        self.open = True


class Batch:
    """A running batch of requests that each need a page for their next token."""

    def __init__(self, requests: int = 0, new_tokens: int = 0) -> None:
        self.reqs = [request(0, new_tokens) for _ in range(requests)]
        self.batch_is_full = True

    def is_empty(self) -> bool:
        return not self.reqs

    def new_tokens_required_next_decode(self) -> int:
        return len(self.reqs) * PAGE_TOKENS


def request(prompt: int | Sequence[int], new_tokens: int) -> Req:
    """``prompt``: tokens, or how many of them, which nothing else begins with."""
    tokens = array("q", [7] * prompt if isinstance(prompt, int) else prompt)
    return Req(f"{len(tokens)} tokens", "", tokens, SamplingParams(max_new_tokens=new_tokens))


def prefill(*requests: Req) -> Any:
    """A batch in flight that writes what the requests ask for."""
    mode = SimpleNamespace(is_extend=lambda: True)
    return SimpleNamespace(reqs=list(requests), forward_mode=mode)


class World:
    def __init__(self, tree: ElasticTree, **flags: Any) -> None:
        self.tree = tree
        self.now_s = 1000.0
        self.sent: list[Any] = []
        args = SimpleNamespace(
            swiftcache_donate="auto",
            swiftcache_low_water=0.2,
            swiftcache_high_water=0.3,
            swiftcache_runtime_dir="/nowhere",
            port=1,
            enable_metrics=False,
        )
        self.scheduler = SimpleNamespace(
            server_args=args,
            token_to_kv_pool_allocator=tree.allocator,
            tree_cache=tree.cache,
            forward_stream=None,
            page_size=PAGE_TOKENS,
            waiting_queue=[],
            chunked_req=None,
            new_token_ratio_tracker=SimpleNamespace(current=1.0),
            enable_hierarchical_cache=False,
            ipc_channels=SimpleNamespace(
                send_to_tokenizer=SimpleNamespace(
                    send_output=lambda message, _: self.sent.append(message)
                )
            ),
        )
        vars(args).update(flags)
        self.batch = Batch()
        self.donation = Donation(self.scheduler)
        self.donor: DonorByHand = self.donation._donor  # type: ignore[assignment]
        self.fence: FenceByHand = self.donation._fence  # type: ignore[assignment]

    def step(self, after_s: float = 0.0, last_batch: Any = None) -> None:
        self.now_s += after_s
        self.donation.step(self.batch, last_batch)

    def holds(self, request: Any, reserved: int = 0) -> bool:
        """Whether the request is not admitted; ``reserved``: for what was admitted before it."""
        tree = self.tree
        left = tree.allocator.available_size() + tree.cache.evictable_size() - reserved
        return self.donation.holds_prefill(SimpleNamespace(rem_total_tokens=left), request)

    def lend_all(self) -> int:
        self.step()
        assert self.donor.theirs
        return len(self.donor.theirs)


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticTree]:
    for name, value in {
        "EXTENT_BYTES": "4KiB",
        "LEND_QUIET_S": "5",
        "COLD_AFTER_S": "60",
        "TAKE_BACK_WAIT_S": "1",
        "RECLAIM_DEADLINE_S": "5",
    }.items():
        monkeypatch.setenv(f"SWIFTCACHE_{name}", value)
    tree = ElasticTree(PAGES)
    yield tree
    tree.close()


@pytest.fixture
def world(tree: ElasticTree, monkeypatch: pytest.MonkeyPatch) -> World:
    made: list[World] = []
    monkeypatch.setattr(donation_module, "ElasticDonor", DonorByHand)
    monkeypatch.setattr(donation_module, "ForwardFence", FenceByHand)
    monkeypatch.setattr(donation_module, "plan_pool_donor", _plan)
    monkeypatch.setattr(
        donation_module.time, "monotonic", lambda: made[0].now_s if made else 1000.0
    )
    made.append(World(tree))
    return made[0]


def _plan(memory: Any, paths: Any, settings: Any) -> Any:
    return SimpleNamespace(paths=paths, size_bytes=memory.size_bytes)


# -- lending ----------------------------------------------------------------------------------


def test_a_start_goes_through_a_lend_and_leaves_all_pages_free(
    tree: ElasticTree, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    hold = tree.allocator.hold
    monkeypatch.setattr(tree.allocator, "hold", lambda slots: (held.extend(slots), hold(slots)))
    World(tree)
    assert len(held) == 1
    assert tree.allocator.available_size() == TOKENS
    assert world.donor.theirs == []
    tree.check()


def test_an_idle_engine_lends_down_to_the_high_mark(world: World) -> None:
    assert world.lend_all() == 8  # of 95 pages, 31 stay
    assert world.tree.allocator.available_size() == 31 * PAGE_TOKENS
    world.tree.check()


def test_what_is_needed_is_not_lent(world: World) -> None:
    world.batch = Batch(requests=2, new_tokens=16 * PAGE_TOKENS)
    assert world.lend_all() == 4
    assert world.tree.allocator.available_size() == 63 * PAGE_TOKENS


def test_a_page_that_a_forward_still_writes_is_not_lent_before_it_was_zeroed(
    world: World,
) -> None:
    """As under SGLang's overlap: a request has finished, its pages are free, and the forward that
    was launched before is still to write one more token of it."""
    world.fence.launch(lambda: world.tree.pool.raw_pages[PAGES].fill_(77))
    world.step()
    world.step(after_s=1.0)
    assert world.donor.theirs == [], "offered while a forward was in flight"
    assert world.tree.allocator.held_tokens > 0, "and yet out of use already"
    world.fence.finish()
    world.step(after_s=1.0)
    assert world.donor.theirs
    extent_bytes = world.tree.allocator.page_map.extent_bytes
    for slot in world.donor.theirs:
        start = slot * extent_bytes
        assert not world.tree.pool._raw[start : start + extent_bytes].any()


def test_what_is_cached_of_a_request_is_not_needed(world: World) -> None:
    prompt = list(range(20 * PAGE_TOKENS))
    assert world.tree.run(prompt)
    world.scheduler.waiting_queue = [request([*prompt, 1, 2, 3], 8)]
    assert world.lend_all() == 5  # of 75 pages, 28.5 stay, and 4 for the rest and the answer


def test_a_prompt_that_is_filled_in_parts_is_needed_whole(world: World) -> None:
    world.scheduler.chunked_req = request(32 * PAGE_TOKENS, 8)
    world.scheduler.chunked_req.prefix_indices = torch.arange(8 * PAGE_TOKENS)
    world.batch = Batch(requests=1, new_tokens=4)
    assert world.lend_all() == 4  # without it, 8


def test_a_prefill_in_flight_is_needed_and_no_idleness(world: World) -> None:
    """SGLang merges it into the running batch only after it has been asked for the next one."""
    admitted = request(8 * PAGE_TOKENS, 40 * PAGE_TOKENS)
    world.scheduler.waiting_queue = [admitted]
    lent = world.lend_all()
    world.scheduler.waiting_queue = []
    world.tree.allocator.alloc(8 * PAGE_TOKENS)
    world.step(last_batch=prefill(admitted))
    assert len(world.donor.theirs) == lent
    world.batch = Batch(requests=1, new_tokens=40 * PAGE_TOKENS)
    world.step()
    assert world.donor.aimed == []


def test_a_busy_scheduler_spends_a_small_part_of_its_time_on_lending(world: World) -> None:
    world.batch = Batch(requests=1, new_tokens=4)
    looks: list[float] = []
    wholly_free = world.tree.allocator.page_map.wholly_free

    def slowly(*args: Any) -> Any:
        looks.append(world.now_s)
        world.now_s += 0.1
        return wholly_free(*args)

    world.tree.allocator.page_map.wholly_free = slowly  # type: ignore[method-assign]
    world.donor.demand = 1
    world.step()
    world.step(after_s=1.8)
    assert len(looks) == 1
    world.step(after_s=0.2)
    assert len(looks) == 2, "a twentieth"
    world.batch = Batch()
    world.step()
    assert len(looks) == 3, "an idle one has the time"


def test_the_cost_of_the_present_loans_is_a_share_of_the_cache(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 9000, 1000):
        assert world.tree.run(list(range(first, first + 10 * PAGE_TOKENS)))
    cached = world.donation.status()["cached_tokens"]
    assert cached == 90 * PAGE_TOKENS
    with monkeypatch.context() as patches:  # a step that makes room, and no extent free yet
        patches.setattr(world.donation, "_wholly_free", lambda extents: [])
        world.step(after_s=100.0)
    assert not world.donor.theirs
    lent = world.lend_all()
    state = world.donation.status()
    assert 0 < state["evicted_tokens"] < cached
    assert state["evicted_share"] == pytest.approx(state["evicted_tokens"] / cached, abs=1e-6)
    world.donor.give_back(lent)
    world.donor.demand = 0
    world.step()
    assert world.donation.status()["evicted_share"] == 0


def test_no_more_steps_cost_an_idle_engine_what_is_hot(world: World) -> None:
    """A pool that is full, half of it cold: what was evicted to lend is not cold once more."""
    tree = world.tree
    cold = [[n] * 5 * PAGE_TOKENS for n in range(9)]
    hot = [[n] * 5 * PAGE_TOKENS for n in range(100, 110)]
    for pair in zip(cold, hot, strict=False):
        for prompt in pair:
            assert tree.run(prompt)
    for prompt in cold:
        tree.node_of(prompt).last_access_time = 0.0  # long ago
    for _ in range(100):
        world.step(after_s=0.004)
    assert world.donor.theirs
    assert 0 < world.donation.status()["evicted_tokens"] <= 45 * PAGE_TOKENS
    assert all(tree.has(prompt) for prompt in hot[: len(cold)])
    tree.check()


def test_extents_side_by_side_are_lent_first(world: World) -> None:
    world.tree.allocator.take(np.array([81]))  # in extent 10, of 12
    world.donor.demand = 2
    world.step()
    world.step()
    assert list(runs_of(world.donor.theirs)) == [range(6, 10)]


# -- taking back ------------------------------------------------------------------------------


def test_the_queues_head_is_enough_to_take_back(world: World) -> None:
    lent = world.lend_all()
    world.scheduler.waiting_queue = [request(40 * PAGE_TOKENS, 8)]
    world.step()
    assert world.donor.aimed[-1] < lent
    assert world.holds(world.scheduler.waiting_queue[0]), "it waits rather than evict"


def test_a_request_behind_one_that_fits_waits_rather_than_have_hot_prefixes_evicted(
    world: World,
) -> None:
    world.lend_all()
    assert world.tree.run(list(range(10 * PAGE_TOKENS)))
    first, second = (request(12 * PAGE_TOKENS, 8) for _ in range(2))
    world.scheduler.waiting_queue = [first, second]
    world.step()
    assert not world.holds(first)
    admitted = 15 * PAGE_TOKENS  # its prompt, its answer and the page that is SGLang's margin
    assert world.holds(second, reserved=admitted)
    world.donor.give_back(len(world.donor.theirs) - world.donor.aimed[-1])
    world.step()
    assert not world.holds(second, reserved=admitted)


def test_a_request_that_fits_beside_what_is_hot_does_not_wait(world: World) -> None:
    """For it, what is cold is evicted."""
    world.lend_all()
    cold, hot = (list(range(first, first + 10 * PAGE_TOKENS)) for first in (0, 1000))
    assert world.tree.run(cold)
    assert world.tree.run(hot)
    world.tree.node_of(cold).last_access_time = 0.0  # long ago
    fits = request(17 * PAGE_TOKENS, 8)
    world.scheduler.waiting_queue = [fits, request(40 * PAGE_TOKENS, 8)]
    world.step(after_s=2.0)
    assert world.donor.aimed
    assert not world.holds(fits)
    assert world.holds(fits, reserved=2 * PAGE_TOKENS)


def test_a_request_that_is_cached_takes_nothing_back(world: World) -> None:
    world.lend_all()
    prompt = list(range(26 * PAGE_TOKENS))
    assert world.tree.run(prompt)
    world.batch = Batch(requests=1, new_tokens=4)
    world.donor.demand = 0
    world.step()
    aimed = list(world.donor.aimed)
    world.scheduler.waiting_queue = [request([*prompt, 1, 2], 2)]
    world.step()
    assert world.donor.aimed == aimed


def test_what_those_that_wait_will_use_does_not_become_cold(world: World) -> None:
    world.lend_all()
    prompt = list(range(20 * PAGE_TOKENS))
    assert world.tree.run(prompt)
    world.scheduler.waiting_queue = [request([*prompt, 1, 2], 2)]
    for _ in range(4):
        world.step(after_s=30.0)
    (node,) = world.tree.cache.root_node.children.values()
    assert node.last_access_time == world.now_s


def test_with_a_low_mark_of_zero_what_sglang_does_not_admit_is_asked_for(world: World) -> None:
    world.donation._marks = WaterMarks(low=0.0)
    world.lend_all()
    owned = 31 * PAGE_TOKENS
    world.scheduler.waiting_queue = [request(owned - 2 * PAGE_TOKENS, PAGE_TOKENS)]
    world.step()
    assert world.donor.aimed, "it admits where there is more than is needed, not as much"


def test_what_comes_back_reopens_admission_and_is_zeroed(world: World) -> None:
    lent = world.lend_all()
    world.scheduler.waiting_queue = [request(40 * PAGE_TOKENS, 8)]
    world.step()
    slot = world.donor.theirs[-1]
    pages = world.tree.allocator.page_map.pages_of(slot)
    world.tree.pool.raw_pages[pages] = 99  # as a receiver wrote it
    world.donor.give_back(lent - world.donor.aimed[-1])
    world.step(after_s=0.01)
    assert not world.batch.batch_is_full
    assert not world.tree.pool.raw_pages[pages].any()
    assert not world.holds(world.scheduler.waiting_queue[0])
    assert world.tree.allocator.available_size() >= 40 * PAGE_TOKENS
    assert world.donation.status()["take_backs"] == 1
    assert world.donation.status()["take_back_seconds"] == pytest.approx(0.01)
    world.tree.check()


def test_nobody_is_waited_for_longer_than_the_setting(world: World) -> None:
    world.lend_all()
    world.scheduler.waiting_queue = [request(40 * PAGE_TOKENS, 8)]
    world.step()
    assert world.holds(world.scheduler.waiting_queue[0])
    world.step(after_s=1.1)
    assert not world.holds(world.scheduler.waiting_queue[0])


def test_a_decode_step_waits_rather_than_evict_or_retract(world: World) -> None:
    world.lend_all()
    hot = list(range(31 * PAGE_TOKENS))
    assert world.tree.run(hot)
    world.batch = Batch(requests=2, new_tokens=PAGE_TOKENS)
    world.step()
    assert world.donor.aimed
    assert world.donation.holds_decode(world.batch, last_batch=None)
    assert world.tree.run(hot), "nothing hot was evicted"
    assert not world.donation.holds_decode(world.batch, prefill()), "it must be merged first"
    world.donor.give_back(len(world.donor.theirs) - world.donor.aimed[-1])
    world.step()
    assert not world.donation.holds_decode(world.batch, last_batch=None)


def test_a_server_that_waits_goes_on_giving_back_to_others(world: World) -> None:
    world.lend_all()
    world.scheduler.enable_hierarchical_cache = True
    polls: list[bool] = []
    world.tree.cache.check_hicache_events = lambda: polls.append(True)  # type: ignore[attr-defined]
    world.tree.run(list(range(31 * PAGE_TOKENS)))
    world.batch = Batch(requests=2, new_tokens=PAGE_TOKENS)
    world.step()
    assert world.donation.holds_decode(world.batch, last_batch=None)
    assert polls == [True]


def test_the_engines_own_cold_prefixes_go_before_lent_memory(world: World) -> None:
    world.lend_all()
    assert world.tree.run(list(range(31 * PAGE_TOKENS)))
    world.tree.node_of(list(range(31 * PAGE_TOKENS))).last_access_time = 0.0  # long ago
    world.scheduler.waiting_queue = [request(4 * PAGE_TOKENS, 4)]
    world.step(after_s=2.0)
    assert world.donor.aimed == [], "the cold pages are enough"
    assert not world.holds(world.scheduler.waiting_queue[0])


def test_a_cold_prefix_that_a_request_goes_on_with_is_not_spare(world: World) -> None:
    world.lend_all()
    old = list(range(31 * PAGE_TOKENS))
    assert world.tree.run(old)
    world.tree.node_of(old).last_access_time = 0.0  # long ago
    world.step(after_s=2.0)
    assert world.donor.aimed == [], "it is cold, and so it is spare"
    world.donation.note_use(SimpleNamespace(last_node=world.tree.node_of(old)))
    world.step()
    assert world.donor.aimed


def test_after_a_take_back_it_is_quiet_for_a_while(world: World) -> None:
    lent = world.lend_all()
    world.scheduler.waiting_queue = [request(40 * PAGE_TOKENS, 8)]
    world.step()
    world.donor.give_back(lent - world.donor.aimed[-1])
    world.step()
    world.scheduler.waiting_queue = []
    kept = len(world.donor.theirs)
    world.step(after_s=4.0)
    assert len(world.donor.theirs) == kept
    world.step(after_s=2.0)
    assert len(world.donor.theirs) > kept


# -- what is never returned -------------------------------------------------------------------


def test_what_cannot_fit_without_stuck_memory_is_aborted_with_the_reason(world: World) -> None:
    world.lend_all()
    world.scheduler.waiting_queue = [request(60 * PAGE_TOKENS, 8), request(4 * PAGE_TOKENS, 4)]
    small = world.scheduler.waiting_queue[1]
    world.step()
    world.donor.stuck = len(world.donor.theirs) - world.donor.aimed[-1]
    world.batch.batch_is_full = True
    world.step(after_s=6.0)
    assert world.scheduler.waiting_queue == [small]
    (aborted,) = world.sent
    assert "is lent and was not given back within 5 s" in aborted.finished_reason["message"]
    assert aborted.finished_reason["status_code"] == 503
    assert not world.batch.batch_is_full, "those behind it are admitted"


def test_what_cannot_fit_is_aborted_once_the_donor_has_failed(world: World) -> None:
    world.donor.stuck = world.lend_all()
    world.donor.demand = 0
    world.donor.state = "failed"
    large, small = request(60 * PAGE_TOKENS, 8), request(4 * PAGE_TOKENS, 4)
    world.scheduler.waiting_queue = [large, small]
    assert not world.holds(large), "nobody waits for what does not come"
    world.step()
    assert world.scheduler.waiting_queue == [small]
    (aborted,) = world.sent
    assert "lending has failed: start the server again" in aborted.finished_reason["message"]


def test_one_that_its_cached_prefix_does_not_make_fit_is_aborted_too(world: World) -> None:
    """The prefix lies in what is owned."""
    world.lend_all()
    prompt = list(range(20 * PAGE_TOKENS))
    assert world.tree.run(prompt)
    world.scheduler.waiting_queue = [request([*prompt, *range(1000, 1060)], 8)]
    world.step()
    assert len(world.scheduler.waiting_queue[0].prefix_indices) == len(prompt)
    world.donor.stuck = len(world.donor.theirs)
    world.step(after_s=6.0)
    assert not world.scheduler.waiting_queue


@pytest.mark.parametrize(("more", "left"), [(-1, 1), (0, 0)])
def test_one_that_needs_all_that_is_owned_is_aborted_as_sglang_would_not_admit_it(
    world: World, more: int, left: int
) -> None:
    world.lend_all()
    owned = world.tree.allocator.size - world.tree.allocator.held_tokens
    world.scheduler.waiting_queue = [request(owned - PAGE_TOKENS - 8 + more, 8)]
    world.step()
    world.donor.stuck = len(world.donor.theirs)
    world.step(after_s=6.0)
    assert len(world.scheduler.waiting_queue) == left


def test_one_that_would_fit_waits_for_those_who_do_give_back(world: World) -> None:
    """Half of what is lent is stuck for a reason of its own, such as an operator's limit."""
    assert world.lend_all() == 8
    world.donor.stuck = 4
    waits = request(50 * PAGE_TOKENS, 8)
    world.scheduler.waiting_queue = [waits]
    world.step()
    assert world.donor.aimed == [4], "all that is not stuck"
    assert world.holds(waits), "rather than have what is hot evicted"
    world.step(after_s=6.0)
    assert world.scheduler.waiting_queue == [waits]
    world.donor.give_back(4)
    world.step()
    assert not world.holds(waits)
    assert world.scheduler.waiting_queue == [waits]
    assert world.sent == []


def test_nobody_is_told_of_a_deadline_that_has_not_passed(world: World) -> None:
    world.lend_all()
    world.donor.stuck = len(world.donor.theirs)
    world.scheduler.waiting_queue = [request(60 * PAGE_TOKENS, 8)]
    world.step()
    world.step(after_s=4.9)
    assert world.sent == []
    world.step(after_s=0.1)
    assert len(world.sent) == 1
    world.scheduler.waiting_queue = [request(4, 4)]
    world.step(after_s=1.0)
    world.scheduler.waiting_queue = [request(60 * PAGE_TOKENS, 8)]
    world.step()
    assert len(world.sent) == 1, "the queue was not short of memory in between"


def test_only_stuck_memory_is_blamed(world: World) -> None:
    world.lend_all()
    world.scheduler.waiting_queue = [request(TOKENS, 8)]  # too large for the whole pool
    world.step()
    world.step(after_s=6.0)
    assert world.sent == []


def test_what_is_stuck_is_given_up_and_lending_goes_on(world: World) -> None:
    assert world.lend_all() == 8
    world.scheduler.waiting_queue = [request(40 * PAGE_TOKENS, 8)]
    world.step()
    asked = 8 - world.donor.aimed[-1]
    world.donor.give_back(asked - 1)
    world.donor.stuck = 8 - (asked - 1)  # a single holder: what it has left is one and the same
    world.step(after_s=0.5)
    assert world.donation.status()["take_back_seconds"] == 0.5
    world.scheduler.waiting_queue = []
    world.step(after_s=6.0)
    assert len(world.donor.theirs) == 8
    assert world.donor.targets[-1] == 8, "beside what is stuck"


def test_a_flush_keeps_lent_pages_out(world: World) -> None:
    lent = world.lend_all()
    world.tree.cache.reset()
    world.tree.allocator.clear()
    assert world.tree.allocator.available_size() == (PAGES - 8 * lent) * PAGE_TOKENS
    world.tree.check()
    world.donor.give_back(lent)
    world.donor.demand = 0
    world.step()
    assert world.tree.allocator.available_size() == TOKENS
    world.tree.check()


def test_a_fraction_is_the_most_that_is_lent(
    tree: ElasticTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donation_module, "ElasticDonor", DonorByHand)
    monkeypatch.setattr(donation_module, "plan_pool_donor", _plan)
    assert World(tree, swiftcache_donate="0.25").lend_all() == 2
