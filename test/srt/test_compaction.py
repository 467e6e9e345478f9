"""Extents are emptied without a request noticing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang.srt.swiftcache.cold_prefixes import ColdPrefixes
from sglang.srt.swiftcache.compaction import Compactor
from sglang.srt.swiftcache.forward_fence import ForwardFence
from support.elastic_tree import PAGE_TOKENS, ElasticTree, look_through
from support.kv_tree import Tree
from support.slow_streams import SlowStreams
from swiftcache_tier.settings import Settings

PLENTY = 1 << 30
PAGES = 95
NODES_PER_STEP = 40


@pytest.fixture(params=[8, 10], ids=["aligned pages", "pages across edges"])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticTree]:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    tree = ElasticTree(PAGES, head_dim=request.param)
    yield tree
    tree.close()


class Worker:
    """A compactor, and what it knows to be cold."""

    def __init__(self, tree: ElasticTree | Tree, bytes_per_step: int = PLENTY) -> None:
        settings = Settings(
            compact_bytes_per_step=bytes_per_step, cold_scan_nodes_per_step=NODES_PER_STEP
        )
        self.cold = ColdPrefixes(tree.cache, tree.allocator, settings)
        self.compactor = Compactor(self.cold, tree.allocator, ForwardFence(None, "cpu"), settings)
        self.totals = self.compactor.totals
        self._tree = tree

    def empty(self, extents: int, lent: set[int], cold_before_s: float = 0.0) -> None:
        """Look through the tree, and take as many steps as it takes, or some that lead nowhere."""
        look_through(self.cold, cold_before_s)
        wanted = self.totals.emptied_extents + extents
        for _ in range(20 * extents):
            if self.totals.emptied_extents < wanted:
                self.step(wanted - self.totals.emptied_extents, lent)

    def step(self, extents: int, lent: set[int]) -> None:
        page_map, free = self._tree.allocator.page_map, self._tree.allocator.free_mask()
        self.compactor.empty(extents, lent.union(page_map.wholly_free(free, lent).tolist()))


def chat(tree: ElasticTree, seed: int, requests: int) -> None:
    """Requests with shared beginnings, until the pool has been full many times."""
    rng = random.Random(seed)
    for _ in range(requests):
        length = rng.randrange(1, 8) * PAGE_TOKENS
        shared = [rng.randrange(3)] * rng.randrange(0, length, PAGE_TOKENS)
        assert tree.run(shared + [rng.randrange(1000) for _ in range(length - len(shared))])


def free_extents(tree: ElasticTree) -> list[int]:
    found: list[int] = tree.allocator.page_map.wholly_free(tree.allocator.free_mask(), ()).tolist()
    return found


def settle(tree: Tree, streams: SlowStreams) -> None:
    """Let all loads and stores end."""
    for _ in range(4):
        streams.synchronize()
        tree.cache.check_hicache_events()
    assert not tree.cache._vacater.in_flight()


def scatter(tree: ElasticTree) -> None:
    """Every second page is in use, by a prefix that was asked for lately."""
    prompts = [[n] * PAGE_TOKENS for n in range(PAGES)]
    for prompt in prompts + prompts[::2]:
        assert tree.run(prompt)
    tree.cache.evict(EvictParams(num_tokens=PAGES // 2 * PAGE_TOKENS))


def test_half_of_the_pool_is_free_and_yet_no_extent_until_some_are_emptied(
    tree: ElasticTree,
) -> None:
    scatter(tree)
    assert tree.allocator.available_size() == PAGES // 2 * PAGE_TOKENS
    assert free_extents(tree) == []
    worker = Worker(tree)
    worker.empty(3, set())
    assert len(free_extents(tree)) == 3
    assert worker.totals.emptied_extents == 3
    assert worker.totals.moved_pages > 0
    assert worker.totals.evicted_tokens == 0
    assert worker.totals.seconds > 0
    tree.check()


def test_what_was_moved_is_hit_and_computed_on(tree: ElasticTree) -> None:
    kept = list(range(6 * PAGE_TOKENS))
    tree.run(kept)
    chat(tree, seed=2, requests=30)
    assert tree.run(kept)
    Worker(tree).empty(8, set(), cold_before_s=time.monotonic())
    assert tree.run(kept + kept[:PAGE_TOKENS])
    tree.check()


def test_what_a_request_uses_stays_where_it_is(tree: ElasticTree) -> None:
    chat(tree, seed=3, requests=100)
    used = list(range(5 * PAGE_TOKENS))
    tree.run(used)
    node = tree.node_of(used)
    tree.cache.inc_lock_ref(node)
    before = node.value.clone()
    worker = Worker(tree)
    worker.empty(20, set(), cold_before_s=time.monotonic())
    assert worker.totals.emptied_extents > 0
    assert torch.equal(node.value, before)
    tree.check()
    tree.cache.dec_lock_ref(node)


def test_what_a_transfer_reads_or_writes_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server in both roles, which stores one prefix and restores another meanwhile."""
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    streams = SlowStreams()
    with streams.in_place():
        tree = Tree(PAGE_TOKENS, PAGES, "write_through", streams=streams, elastic=True)
        tree.tier.join(0, 80)
        # The first two fill an extent each, at least.
        beginnings = [[n] * pages * PAGE_TOKENS for n, pages in enumerate((16, 16, 4))]
        restored, stored, *others = [[*some, *[99] * PAGE_TOKENS] for some in beginnings]
        for prompt in (restored[:-PAGE_TOKENS], restored, *others):
            tree.run(prompt)
        settle(tree, streams)
        tree.cache.evict(EvictParams(num_tokens=len(restored)))
        request = tree.start(restored)
        assert request is not None
        tree.finish(request)
        tree.run(stored[:-PAGE_TOKENS])
        tree.run(stored)
        in_transfer = {n: n.value.clone() for n in tree.cache._vacater.in_flight()}
        assert len(in_transfer) == 4, "two nodes each"
        worker = Worker(tree)
        worker.empty(20, set())
        for node, before in in_transfer.items():
            assert torch.equal(node.value, before)
        settle(tree, streams)
        worker.empty(20, set())
        assert worker.totals.moved_pages > 0, "now they are moved"
        for prompt in (restored, stored, *others):
            assert tree.run(prompt) == len(prompt)
        tree.check()
        settle(tree, streams)
        tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))
        for prompt in (restored, stored, *others):
            assert tree.run(prompt) == len(prompt), "restored, and checked to be what it was"


def test_a_step_is_bounded(tree: ElasticTree) -> None:
    scatter(tree)
    page_map = tree.allocator.page_map
    limit = int(page_map.extent_pages) + 2
    worker = Worker(tree, limit * page_map.page_bytes)
    look_through(worker.cold, 0.0)
    for _ in range(20):
        moved = worker.totals.moved_pages
        worker.step(4 - worker.totals.emptied_extents, set())
        assert worker.totals.moved_pages - moved <= limit
    assert worker.totals.emptied_extents == 4
    tree.check()


def test_whose_the_pages_are_is_learned_a_slice_at_a_time(
    tree: ElasticTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter(tree)
    worker = Worker(tree)
    look_through(worker.cold, 0.0)
    nodes = len(worker.cold.last_look.unused)
    assert nodes > NODES_PER_STEP
    looked_at: list[TreeNode] = []
    is_unused = worker.cold.is_unused
    monkeypatch.setattr(
        worker.cold, "is_unused", lambda node: looked_at.append(node) or is_unused(node)
    )
    worker.step(1, set())  # which has nothing to work by, and takes what was seen
    for _ in range(nodes // NODES_PER_STEP):
        looked_at.clear()
        worker.step(1, set())
        assert 0 < len(looked_at) <= NODES_PER_STEP
        assert worker.totals.moved_pages == 0
    worker.step(1, set())
    assert worker.totals.emptied_extents == 1
    tree.check()


def test_no_more_is_evicted_than_what_is_moved_needs_room_for(tree: ElasticTree) -> None:
    """The pool is full, and all of it is cold."""
    chat(tree, seed=5, requests=100)
    tree.run([-1] * tree.allocator.available_size())
    worker = Worker(tree)
    worker.empty(2, set(), cold_before_s=time.monotonic())
    assert worker.totals.emptied_extents == 2
    extent = int(tree.allocator.page_map.extent_pages) + 2
    largest = 8  # a leaf is evicted whole
    assert worker.totals.evicted_tokens <= 2 * (extent + largest) * PAGE_TOKENS
    tree.check()


def test_what_is_not_cold_is_not_evicted_to_make_room(tree: ElasticTree) -> None:
    chat(tree, seed=5, requests=100)
    tree.run([-1] * tree.allocator.available_size())
    worker = Worker(tree)
    worker.empty(2, set(), cold_before_s=0.0)
    assert worker.totals.evicted_tokens == 0
    assert worker.totals.emptied_extents == 0
    tree.check()


def test_a_neighbour_of_what_is_lent_is_emptied_first(tree: ElasticTree) -> None:
    scatter(tree)
    worker = Worker(tree)
    worker.empty(1, {5})
    (found,) = free_extents(tree)
    assert found in (4, 6)


def test_no_more_is_begun_than_there_is_room_for(tree: ElasticTree) -> None:
    scatter(tree)
    worker = Worker(tree)
    worker.empty(10, set())  # as many as half of the pool is, and more
    assert worker.totals.emptied_extents >= 4
    assert len(free_extents(tree)) == worker.totals.emptied_extents
    tree.check()


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_lending_chatting_and_compacting(tree: ElasticTree, seed: int) -> None:
    """Nothing is lost, moved wrongly, or used by two, flushes included."""
    rng = random.Random(seed)
    worker = Worker(tree)
    lent: set[int] = set()
    for _ in range(40):
        match rng.randrange(7):
            case 0 | 1:
                chat(tree, rng.randrange(1 << 20), requests=4)
            case 2:
                worker.empty(rng.randrange(1, 4), lent, rng.choice([0.0, time.monotonic()]))
            case 3:
                mask = tree.allocator.free_mask()
                slots = tree.allocator.page_map.wholly_free(mask, lent).tolist()[:2]
                if len(lent) + len(slots) < tree.allocator.page_map.extents // 2:
                    tree.allocator.hold(slots)
                    lent.update(slots)
                    tree.pool.zero_extents(slots)
            case 4 if lent:
                slots = rng.sample(sorted(lent), 1)
                lent.difference_update(slots)
                tree.allocator.release(slots)
            case 5 if rng.random() < 0.2:
                tree.cache.reset()
                tree.allocator.clear()
            case 6:  # by what was seen earlier
                worker.step(rng.randrange(1, 4), lent)
        tree.check()
