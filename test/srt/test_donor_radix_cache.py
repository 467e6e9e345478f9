"""The tree over device and donors: right content always, nothing lost, memory given back."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang.srt.swiftcache import tier_wiring
from sglang.srt.swiftcache.expiry import Expiry
from sglang.srt.swiftcache.state_dump import StateDump
from sglang.srt.swiftcache.vacate import Vacater
from support.kv_tree import Running, Tree, vacated
from support.slow_streams import SlowLife, SlowStreams
from swiftcache_kernel.copy_engine import CopyRefused

POLICIES = ("write_through", "write_through_selective", "write_back")


def prompt(kind: int, pages: int, page_size: int) -> list[int]:
    """Prompts of one kind are prefixes of each other; different kinds part after two pages."""
    shared = [1, 2, 3, 4] * page_size
    own = [100 + kind] * (pages * page_size)
    return (shared[: 2 * page_size] + own)[: pages * page_size]


@pytest.fixture(params=[1, 4])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def filled(tree: Tree, kinds: int, pages: int = 8) -> None:
    for kind in range(kinds):
        assert tree.run(prompt(kind, pages, tree.page_size)) is not None


@contextmanager
def slow_tree(policy: str) -> Iterator[tuple[Tree, SlowStreams]]:
    """Has computed one prompt; nothing of it is stored before a stream goes on."""
    streams = SlowStreams()
    with streams.in_place():
        tree = Tree(4, pages=16, policy=policy, streams=streams)
        tree.tier.join(1, extents=64)
        filled(tree, kinds=1)
        yield tree, streams


def test_a_prefix_evicted_from_the_device_comes_back_from_donors(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=64)
    filled(tree, kinds=4)  # 26 pages through a pool of 16
    assert tree.run(prompt(0, 8, page_size)) == 8 * page_size
    assert tree.cache.tier_pool.loaded_bytes > 0
    tree.check()


def test_without_donors_the_same_prefix_is_recomputed(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    filled(tree, kinds=4)
    cached = tree.run(prompt(0, 8, page_size))
    assert cached is not None
    assert cached < 8 * page_size
    tree.check()


def test_the_nodes_of_a_step_are_stored_by_one_operation() -> None:
    tree = Tree(4, pages=48, policy="write_through")
    tree.tier.join(1, extents=64)
    requests = [tree.start(prompt(kind, 8, 4)) for kind in range(4)]
    for request in requests:
        assert request is not None
        tree.finish(request)
    pool = tree.cache.tier_pool
    assert tree.cache.stores.waiting >= 4
    operations: list[int] = []
    store = pool.store

    def noted(blocks: Any, *pages: Any) -> None:
        operations.append(len(blocks))
        store(blocks, *pages)

    with mock.patch.object(pool, "store", noted):
        tree.cache.check_hicache_events()
    assert operations == [sum(len(node.host_value) for node in tree.nodes())]
    assert tree.cache.stores.waiting == 0
    assert not tree.cache.ongoing_write_through
    tree.cache.evict(EvictParams(num_tokens=48 * 4))
    assert all(tree.run(prompt(kind, 8, 4)) == 32 for kind in range(4))
    tree.check()


def test_a_store_begins_when_its_pages_are_known_and_holds_its_node_till_then() -> None:
    with slow_tree(policy="write_through") as (tree, streams):
        for _ in range(3):
            tree.cache.check_hicache_events()
        assert tree.cache.stores.waiting > 0
        assert tree.cache.tier_pool.stored_bytes == 0
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        assert all(node.value is not None for node in tree.nodes()), "evicted before it was stored"
        tree.check()
        for _ in range(2):  # the pages are known, the store is done
            streams.synchronize()
            tree.cache.check_hicache_events()
        assert tree.cache.stores.waiting == 0
        assert not tree.cache.ongoing_write_through
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        assert tree.run(prompt(0, 8, 4)) == 32
        streams.synchronize()
        tree.check()


def test_write_back_waits_for_the_stores_of_what_it_evicts() -> None:
    with slow_tree(policy="write_back") as (tree, streams):
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        assert streams.schedule.done == streams.schedule.end
        assert all(node.value is None for node in tree.nodes())
        assert tree.run(prompt(0, 8, 4)) == 32
        streams.synchronize()
        tree.check()


def test_a_flush_forgets_stores_that_have_not_begun() -> None:
    with slow_tree(policy="write_through") as (tree, streams):
        tree.cache.check_hicache_events()
        assert tree.cache.stores.waiting > 0
        tree.cache.reset()
        tree.allocator.clear()
        streams.synchronize()
        tree.cache.check_hicache_events()
    assert tree.cache.tier_pool.stored_bytes == 0
    tree.check()


@pytest.mark.parametrize("copies", [True, False])
def test_to_evict_does_not_wait_for_the_gpu_and_frees_all_nodes_at_once(
    page_size: int, copies: bool
) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    if copies:
        tree.tier.join(1, extents=64)
    filled(tree, kinds=2, pages=6)
    tree.cache.check_hicache_events()
    assert len(tree.nodes()) > 1
    assert all(node.backuped == copies for node in tree.nodes())
    waits = mock.patch("torch.unique", side_effect=AssertionError("its size is the GPU's to know"))
    release = tree.allocator._release_page_ids
    with waits, mock.patch.object(tree.allocator, "_release_page_ids", wraps=release) as released:
        assert tree.cache.evict(EvictParams(num_tokens=16 * page_size)).num_tokens_evicted
    assert released.call_count == 1
    assert tree.allocator.available_size() == tree.tokens_total
    assert tree.run(prompt(0, 6, page_size)) == (6 * page_size if copies else 0)
    tree.check()


def test_to_evict_among_other_frees_leaves_them_to_the_end_of_their_group() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    filled(tree, kinds=1)
    slots = tree.allocator.alloc(16)
    tree.allocator.free_group_begin()
    tree.allocator.free(slots)
    tree.cache.evict(EvictParams(num_tokens=16 * 4))
    tree.allocator.free_group_end()
    assert tree.allocator.available_size() == tree.tokens_total


class RefusedAtFirst:
    """In place of the paths: what they make is refused until they are told so."""

    def __init__(self, paths: Any, refused: str) -> None:
        self._paths = paths
        self._refused = refused
        self.given_up = False

    def give_up_copies(self, error: CopyRefused) -> None:
        self.given_up = True

    def load(self, *batch: Any) -> Any:
        return tuple(self._or_refuse(transfer) for transfer in self._paths.load(*batch))

    def store(self, *batch: Any) -> Any:
        return self._or_refuse(self._paths.store(*batch))

    def _or_refuse(self, transfer: Any) -> Any:
        if not self.given_up:
            refuse = mock.Mock(side_effect=CopyRefused("cudaMemcpy2DAsync failed"))
            setattr(transfer, self._refused, refuse)
        return transfer


@pytest.mark.parametrize("refused", ["gather_layers", "scatter_all"])
def test_what_the_copy_engines_refuse_is_copied_otherwise(refused: str) -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=64)
    pool = tree.cache.tier_pool
    pool._paths = paths = RefusedAtFirst(pool._paths, refused)  # type: ignore[assignment]
    filled(tree, kinds=4)
    assert tree.run(prompt(0, 8, 4)) == 32
    assert paths.given_up
    tree.check()


def test_a_load_is_told_what_its_requests_compute_themselves() -> None:
    tree = Tree(4, pages=48, policy="write_through")
    tree.tier.join(1, extents=64)
    filled(tree, kinds=2, pages=8)
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=48 * 4))
    pool = tree.cache.tier_pool
    told: list[int] = []
    load = pool._paths.load

    def noted(blocks: Any, pages: Any, new_tokens: int) -> Any:
        told.append(new_tokens)
        return load(blocks, pages, new_tokens)

    with mock.patch.object(pool._paths, "load", noted):
        for kind, pages in ((0, 8), (1, 11)):
            assert tree.run(prompt(kind, pages, 4)) == 8 * 4
    assert told == [0, 3 * 4]


def no_batch(tree: Tree) -> Any:
    """Requests are looked at, and none of them runs."""
    return mock.patch.object(tree.cache, "ready_to_load_host_cache", return_value=-1)


def test_a_request_that_found_no_room_for_its_load_counts_for_no_other() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=64)
    filled(tree, kinds=2, pages=12)
    tree.cache.check_hicache_events()
    running = tree.start(prompt(1, 12, 4))
    assert running is not None
    with no_batch(tree):
        assert tree.start(prompt(0, 14, 4)) is None
    assert tree.cache.tier_pool.new_tokens == 0


def test_a_flush_forgets_what_loads_that_never_began_were_told() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=64)
    filled(tree, kinds=1)
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=16 * 4))
    with no_batch(tree):
        tree.start(prompt(0, 10, 4))
    assert tree.cache.tier_pool.new_tokens == 2 * 4
    tree.cache.reset()
    assert tree.cache.tier_pool.new_tokens == 0


def test_memory_asked_back_is_moved_to_another_donor(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.join(2, extents=8)
    tree.tier.ask_back(1, range(8))
    tree.cache.check_hicache_events()
    tree.cache.check_hicache_events()
    assert not tree.tier.waiting, "the donor did not get its memory back"
    assert tree.cache.stats.moved_blocks > 0
    assert tree.cache.stats.lost_blocks == 0
    assert tree.run(prompt(0, 8, page_size)) == 8 * page_size
    tree.check()


def test_memory_asked_back_is_given_back_while_the_engine_is_paused(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.join(2, extents=8)
    running = tree.start(prompt(0, 10, page_size))  # on what comes from donors
    assert running is not None
    tree.tier.ask_back(1, range(8))
    for paused in (False, True, True):
        assert tree.tier.waiting, "an engine that is not paused does this in its step"
        scheduler = SimpleNamespace(tree_cache=tree.cache, _engine_paused=paused)
        tier_wiring.follow_donors_while_paused(None, scheduler, [])
    assert not tree.tier.waiting
    tree.check([running])
    tree.check_content(running.tokens, running.slots)
    tree.finish(running)
    tree.check()


def test_memory_asked_back_with_nowhere_to_go_is_a_miss(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.ask_back(1, range(8))
    tree.cache.check_hicache_events()
    tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    assert tree.cache.stats.lost_blocks > 0
    assert tree.tier.total_blocks == 0
    cached = tree.run(prompt(0, 8, page_size))
    assert cached is not None
    assert cached < 8 * page_size
    tree.check()


def test_what_is_logged_of_memory_asked_back_adds_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tree = Tree(4, pages=16, policy="write_through", extent_bytes=4096)
    for key in (1, 2):
        tree.tier.join(key, extents=key)
    filled(tree, kinds=4)
    held = tree.tier.donor_of(tree.tier.pool.in_use())
    assert set(held.tolist()) == {1, 2}
    tree.tier.ask_back(1, range(1))
    tree.cache.check_hicache_events()
    tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    first, *_ = vacated(caplog.records, tree.cache.stats.lost_blocks)
    assert first.asked_blocks == np.count_nonzero(held == 1)
    assert first.lost_blocks > 0
    assert first.lost_beside_blocks > 0, "of the same prefixes, on the donor that stays"


def small_steps(tree: Tree, blocks: int) -> None:
    """Vacate no more than this many blocks in one step."""
    pool = tree.cache.tier_pool
    most = blocks * pool.block_layout.block_bytes
    pool.settings = replace(pool.settings, vacate_bytes_per_step=most)


def test_memory_of_a_lost_donor_is_vacated_step_by_step_until_its_deadline() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.join(2, extents=8)
    small_steps(tree, blocks=1)
    tree.tier.lose(1, range(8))
    held = tree.tier.must_vacate().size
    tree.cache.check_hicache_events()
    left = tree.tier.must_vacate().size
    assert 0 < left < held
    assert tree.cache.stats.lost_blocks == 0

    tree.tier.pass_deadline(1)
    tree.cache.check_hicache_events()
    assert tree.tier.must_vacate().size == 0
    assert tree.cache.stats.lost_by_cause["donor_lost"] == left
    tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    assert tree.run(prompt(0, 8, 4)) is not None
    tree.check()


def test_the_tree_is_looked_through_once_for_what_is_asked_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    for kind in range(8):
        tree.run([100 + kind] * 16)
    tree.tier.join(2, extents=8)
    small_steps(tree, blocks=4)
    looks = 0
    look = Vacater._hottest_first

    def counted(vacater: Vacater, doomed: np.ndarray) -> list[TreeNode]:
        nonlocal looks
        looks += 1
        return look(vacater, doomed)

    monkeypatch.setattr(Vacater, "_hottest_first", counted)
    tree.tier.ask_back(1, range(8))
    steps = 0
    while tree.tier.must_vacate().size:
        tree.cache.check_hicache_events()
        steps += 1
    assert steps == 8
    assert looks == 1
    assert tree.cache.stats.lost_blocks == 0
    tree.check()


def test_a_flush_while_memory_is_vacated_leaves_nothing_of_the_old_tree() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.join(2, extents=8)
    small_steps(tree, blocks=1)
    tree.tier.ask_back(1, range(8))
    tree.cache.check_hicache_events()
    assert tree.tier.must_vacate().size
    tree.cache.reset()
    tree.allocator.clear()
    tree.tier.poll()
    filled(tree, kinds=4)
    tree.tier.ask_back(2, range(4))
    for _ in range(60):
        tree.cache.check_hicache_events()
        tree.check()
    assert not tree.tier.waiting


def test_colder_prefixes_are_not_saved_at_the_cost_of_hotter_ones() -> None:
    tree = Tree(4, pages=8, policy="write_through", extent_bytes=8192)
    tree.tier.join(1, extents=1)
    for kind in range(4):
        tree.run([100 + kind] * 16)
        tree.cache.check_hicache_events()
    tree.tier.join(2, extents=1)
    for kind in range(4, 8):
        tree.run([100 + kind] * 16)
        tree.cache.check_hicache_events()
    assert tree.tier.free_blocks == 0
    tree.tier.lose(1, [0])
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert {node.key.token_ids[0] - 100 for node in tree.nodes()} == {4, 5, 6, 7}
    assert tree.cache.stats.lost_by_cause["donor_lost"] == 16
    tree.check()


def test_what_a_request_uses_is_moved_after_the_deadline_too() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=1)
    request = tree.start(prompt(0, 8, 4))
    assert request is not None
    used = tree.tier.used_blocks
    tree.tier.join(2, extents=8)
    tree.tier.lose(1, range(8))
    tree.tier.pass_deadline(1)
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    assert tree.tier.used_blocks == used
    assert tree.cache.stats.lost_blocks == 0
    tree.finish(request)
    tree.check()


def test_the_hottest_prefix_survives_a_partial_reclaim() -> None:
    tree = Tree(4, pages=16, policy="write_through", extent_bytes=4096)
    tree.tier.join(1, extents=4)
    filled(tree, kinds=4)
    tree.run(prompt(0, 8, 4))  # now the hottest
    tree.run(prompt(3, 8, 4))
    held = tree.tier.used_blocks
    tree.tier.ask_back(1, range(2))
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    assert 0 < tree.tier.used_blocks <= held
    assert tree.run(prompt(3, 8, 4)) == 32
    tree.check()


def test_a_donor_that_comes_back_is_used_again(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    tree.tier.ask_back(1, range(8))
    tree.cache.check_hicache_events()
    tree.cache.check_hicache_events()
    tree.tier.lend(1, range(8))
    filled(tree, kinds=4)
    filled(tree, kinds=4)
    assert tree.run(prompt(0, 8, page_size)) == 8 * page_size
    tree.check()


def test_memory_of_a_load_in_flight_is_not_given_back() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    controller = tree.cache.cache_controller
    request = tree.start(prompt(0, 8, 4))
    assert request is not None
    assert controller.ack_load_queue, "no load is in flight"
    pending = list(controller.ack_load_queue)
    controller.ack_load_queue.clear()  # as if the copy had not completed
    tree.tier.ask_back(1, range(8))
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert tree.tier.waiting, "memory went back while a load was reading it"
    busy = {node for node in tree.nodes() if node.host_value is not None}
    assert busy
    assert busy <= tree.cache._vacater.in_flight()
    controller.ack_load_queue.extend(pending)
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    tree.finish(request)
    tree.check()


def test_flush_frees_every_block_and_the_memory_stays(page_size: int) -> None:
    tree = Tree(page_size, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    total = tree.tier.total_blocks
    filled(tree, kinds=4)
    assert tree.tier.used_blocks > 0
    tree.cache.reset()
    tree.allocator.clear()
    assert tree.tier.free_blocks == tree.tier.total_blocks == total
    filled(tree, kinds=4)
    tree.check()


def test_a_flush_forgets_the_transfers_in_flight() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    request = tree.start(prompt(0, 8, 4))
    assert request is not None
    assert tree.cache.ongoing_load_back, "no load is in flight"
    tree.cache.reset()
    tree.allocator.clear()
    filled(tree, kinds=4)
    tree.tier.ask_back(1, range(8))
    for _ in range(3):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    tree.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tier_evicts_the_least_recently_used(policy: str) -> None:
    tree = Tree(4, pages=16, policy=policy, extent_bytes=4096)
    tree.tier.join(1, extents=3)
    assert tree.tier.total_blocks < 40
    for round_ in range(3):
        filled(tree, kinds=10)
        tree.check()
        assert round_ or tree.tier.used_blocks > 0
    last = tree.run(prompt(9, 8, 4))
    assert last == 32


def test_a_corrupted_block_is_seen_by_these_tests() -> None:
    """The control: if a restore went wrong, the content check would say so."""
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    filled(tree, kinds=4)
    node = next(n for n in tree.nodes() if n.evicted and n.host_value is not None)
    import ctypes

    block = tree.cache.tier_pool.blocks_of(node.host_value)[:1]
    ctypes.memset(int(tree.tier.addresses(block)[0]), 0, tree.tier.block_bytes)

    def run_all() -> None:
        for kind in range(4):
            tree.run(prompt(kind, 8, 4))

    with pytest.raises(AssertionError, match="wrong KV"):
        run_all()


def test_a_store_that_is_thought_done_too_early_is_seen_by_these_tests() -> None:
    """The control for what follows: bytes are moved no sooner than somebody waits for them."""
    with slow_tree(policy="write_through") as (tree, streams):
        tree.cache.check_hicache_events()
        streams.synchronize()
        tree.cache.check_hicache_events()
        acknowledgements = tree.cache.cache_controller.ack_write_queue
        acknowledgements[0] = acknowledgements[0]._replace(
            finish_event=acknowledgements[0].start_event
        )
        tree.cache.check_hicache_events()
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        with pytest.raises(AssertionError, match="wrong KV"):
            tree.run(prompt(0, 8, 4))


@contextmanager
def tree_beside_a_forward(decoded: int) -> Iterator[tuple[Tree, SlowStreams, list[int]]]:
    """A prompt lies on donors alone, and a request has ended with ``decoded`` tokens, of which the
    last is still computed. Its tokens come, too."""
    with slow_tree(policy="write_through") as (tree, streams):
        for _ in range(4):
            tree.cache.check_hicache_events()
            streams.synchronize()
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        assert all(node.evicted for node in tree.nodes())
        ending = tree.start(prompt(1, 3, 4))
        assert ending is not None
        decode = [5] * decoded
        assert tree.finish_beside_a_forward(ending, decode)
        yield tree, streams, [*ending.tokens, *decode]


def test_a_load_comes_after_what_a_forward_in_flight_writes_into_freed_pages() -> None:
    with tree_beside_a_forward(decoded=3) as (tree, streams, _):
        (freed,) = {int(page) for page in tree.allocator.free_pages[:1]}
        request = tree.start(prompt(0, 8, 4))
        assert request is not None
        assert request.cached == 32
        assert freed * 4 in request.slots[8:].tolist(), "the page is loaded into"
        tree.cache.cache_controller.load_stream.synchronize()  # as early as it may
        streams.synchronize()
        tree.finish(request)
        assert tree.run(prompt(0, 8, 4)) == 32
        tree.check()


def test_a_store_comes_after_what_a_forward_in_flight_writes_of_an_ended_request() -> None:
    """The engine is paused, so nobody looks at what the forward has computed."""
    with tree_beside_a_forward(decoded=4) as (tree, streams, tokens):
        for _ in range(2):
            streams.schedule.synchronize()
            tree.cache.check_hicache_events()
        tree.cache.cache_controller.write_stream.synchronize()  # as early as it may
        for _ in range(2):
            streams.synchronize()
            tree.cache.check_hicache_events()
        tree.cache.evict(EvictParams(num_tokens=16 * 4))
        assert tree.run(tokens) == 16
        tree.check()


class TreeMachine(RuleBasedStateMachine):
    """Requests, aborts, evictions, flushes; donors that join, ask back, lend again and end."""

    verify = False
    replicas = 1
    streams: SlowStreams | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        page_size=st.sampled_from([1, 4]),
        extent_bytes=st.sampled_from([4096, 8192]),
        extents=st.sampled_from([1, 2, 6]),
    )
    def begin(self, policy: str, page_size: int, extent_bytes: int, extents: int) -> None:
        self.tree = Tree(
            page_size,
            pages=20,
            policy=policy,
            extent_bytes=extent_bytes,
            verify=self.verify,
            replicas=self.replicas,
            streams=self.streams,
        )
        self.running: list[Running] = []
        self.lent: dict[int, set[int]] = {}
        self.back: dict[int, set[int]] = {}
        # Most of what can go wrong needs memory to be there; donors that come later join as well.
        self.join(1, extents)

    @rule(prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=1, max_size=6))
    def whole_requests(self, prompts: list[tuple[int, int]]) -> None:
        for kind, pages in prompts:
            self.tree.run(prompt(kind, pages, self.tree.page_size))

    @rule(
        kind=st.integers(0, 5),
        pages=st.integers(1, 9),
        tail=st.integers(0, 2),
    )
    def request(self, kind: int, pages: int, tail: int) -> None:
        tokens = prompt(kind, pages, self.tree.page_size)
        tokens[len(tokens) // 2 :] = [t + tail for t in tokens[len(tokens) // 2 :]]
        if len(self.running) >= 2:
            return
        request = self.tree.start(tokens)
        if request is not None:
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(abort=st.booleans())
    def end(self, abort: bool) -> None:
        request = self.running.pop(0)
        (self.tree.abort if abort else self.tree.finish)(request)

    @precondition(lambda self: self.running)
    @rule(decoded=st.integers(1, 4))
    def end_beside_a_forward(self, decoded: int) -> None:
        decode = [200] * min(decoded, self.tree.page_size)
        if self.tree.finish_beside_a_forward(self.running[0], decode):
            self.running.pop(0)

    @rule(key=st.integers(1, 3), extents=st.integers(1, 6))
    def join(self, key: int, extents: int) -> None:
        if key not in self.lent:
            self.tree.tier.join(key, extents)
            self.lent[key], self.back[key] = set(range(extents)), set()

    @rule(key=st.integers(1, 3), count=st.integers(1, 4))
    def ask_back(self, key: int, count: int) -> None:
        slots = sorted(self.lent.get(key, ()))[:count]
        if slots:
            self.tree.tier.ask_back(key, slots)
            self.lent[key] -= set(slots)
            self.back[key] |= set(slots)

    @rule(key=st.integers(1, 3), past_deadline=st.booleans())
    def lose(self, key: int, past_deadline: bool) -> None:
        """A donor ends; its key does not come back."""
        if slots := sorted(self.lent.get(key, ())):
            self.lent[key] = set()
            self.tree.tier.lose(key, slots)
        if past_deadline and key in self.tree.tier.lost_donors():
            self.tree.tier.pass_deadline(key)

    @rule(key=st.integers(1, 3))
    def lend_again(self, key: int) -> None:
        waiting = {s for k, slots in self.tree.tier.waiting if k == key for s in slots}
        slots = sorted(self.back.get(key, set()) - waiting)
        if slots and key not in self.tree.tier.lost_donors():
            self.tree.tier.lend(key, slots)
            self.back[key] -= set(slots)
            self.lent[key] |= set(slots)

    @rule()
    def step(self) -> None:
        self.tree.cache.check_hicache_events()

    @rule()
    def store_coldest(self) -> None:
        if self.tree.cache._cold_copies is not None:
            self.tree.cache._cold_copies.store_coldest()

    @rule(share=st.floats(0, 1))
    def expire(self, share: float) -> None:
        """The older part of all nodes has not been used for the TTL."""
        used_s = sorted(node.last_access_time for node in self.tree.nodes())
        if used_s:
            oldest_left_s = used_s[int(share * (len(used_s) - 1))]
            Expiry(self.tree.cache, self.tree.cache._vacater, 1.0).forget_older_than(oldest_left_s)

    @rule(tokens=st.integers(1, 80))
    def evict_device(self, tokens: int) -> None:
        self.tree.cache.evict(EvictParams(num_tokens=tokens))

    @rule(tokens=st.integers(1, 40))
    def evict_host(self, tokens: int) -> None:
        self.tree.cache.evict_host(tokens)

    @rule()
    def flush(self) -> None:
        if not self.running:
            self.tree.cache.reset()
            self.tree.allocator.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check(self.running)

    def all_goes_on(self) -> None:
        """What takes its time has had it."""

    def teardown(self) -> None:
        if not hasattr(self, "tree"):
            return
        while self.running:
            self.tree.finish(self.running.pop())
        for key, slots in self.lent.items():
            if slots:
                self.tree.tier.ask_back(key, sorted(slots))
        for _ in range(4):
            self.all_goes_on()
            self.tree.cache.check_hicache_events()
        assert not self.tree.tier.waiting, "memory that was asked back never came"
        assert np.all(self.tree.tier.must_vacate() >= 0)
        assert self.tree.tier.total_blocks == 0
        self.tree.check()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class SlowTreeMachine(SlowLife, TreeMachine):
    """The same life, in which pages become known and stores, loads and forwards are done as late as
    a rule says, or when somebody waits for them.

    What has not come to its end holds its nodes, and nothing else: the books of the server's own
    audit are looked at after every step.
    """

    @rule()
    def step_while_paused(self) -> None:
        scheduler = SimpleNamespace(tree_cache=self.tree.cache, _engine_paused=True)
        tier_wiring.follow_donors_while_paused(None, scheduler, [])

    @rule(kind=st.integers(0, 5), pages=st.integers(3, 9), decoded=st.integers(0, 4))
    def load(self, kind: int, pages: int, decoded: int) -> None:
        """Begin to load what lies on donors alone by now, where another request has just ended."""
        tokens = prompt(kind, pages, self.tree.page_size)
        for _ in range(2):  # the second time for the policy that stores what was hit
            self.tree.run(tokens)
        for _ in range(2):
            self.tree.cache.check_hicache_events()
            self.streams.synchronize()
        self.tree.cache.check_hicache_events()
        self.tree.cache.evict(EvictParams(num_tokens=self.tree.tokens_total))
        if self.running and decoded:
            self.end_beside_a_forward(decoded)
        self.request(kind, pages, tail=0)

    @rule(key=st.integers(1, 3), lost=st.booleans())
    def all_back(self, key: int, lost: bool) -> None:
        """A donor wants all that it lent, or ends, and the scheduler has steps for it."""
        if lost:
            self.lose(key, past_deadline=True)
        else:
            self.ask_back(key, 6)
        for _ in range(2):
            self.tree.cache.check_hicache_events()

    @precondition(lambda self: self.tree.cache._cold_copies is not None)
    @rule(kinds=st.permutations(range(4)), pages=st.integers(3, 7))
    def choose_copies(self, kinds: list[int], pages: int) -> None:
        """What was computed last gives up its copy for what is about to be evicted."""
        for kind in kinds:
            for _ in range(2):
                self.tree.run(prompt(kind, pages, self.tree.page_size))
            self.store_coldest()

    @invariant()
    def the_audit_finds_nothing(self) -> None:
        if hasattr(self, "tree"):
            assert (
                StateDump(scheduler_of(self.tree, self.running), self.tree.cache).violations() == []
            )

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "tree"):
            assert not self.tree.cache.protected_size(), "a lock was never taken off"


def scheduler_of(tree: Tree, running: list[Running]) -> Any:
    """As far as an audit looks at one that has these requests."""
    requests = [
        SimpleNamespace(
            rid=place,
            req_pool_idx=place,
            last_node=request.last_node,
            cache_protected_len=request.cached,
            kv=SimpleNamespace(kv_allocated_len=len(request.slots)),
        )
        for place, request in enumerate(running)
    ]
    return SimpleNamespace(
        running_batch=SimpleNamespace(reqs=requests),
        last_batch=None,
        cur_batch_for_debug=None,
        chunked_req=None,
        max_total_num_tokens=tree.tokens_total,
    )


TestSlowTreeMachine = SlowTreeMachine.TestCase
TestSlowTreeMachine.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
