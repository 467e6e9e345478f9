"""Extents are emptied without a request noticing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.swiftcache.compaction import Compactor
from sglang.srt.swiftcache.forward_fence import ForwardFence
from support.elastic_tree import PAGE_TOKENS, ElasticTree

PLENTY = 1 << 30
PAGES = 95


@pytest.fixture(params=[8, 10], ids=["aligned pages", "pages across edges"])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticTree]:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    tree = ElasticTree(PAGES, head_dim=request.param)
    yield tree
    tree.close()


def compactor(tree: ElasticTree, bytes_per_step: int = PLENTY) -> Compactor:
    return Compactor(tree.cache, tree.allocator, ForwardFence(None, "cpu"), bytes_per_step)


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
    worker = compactor(tree)
    worker.empty(3, set(), cold_tokens=0)
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
    compactor(tree).empty(8, set(), cold_tokens=PAGES * PAGE_TOKENS)
    assert tree.run(kept + kept[:PAGE_TOKENS])
    tree.check()


def test_what_a_request_uses_stays_where_it_is(tree: ElasticTree) -> None:
    chat(tree, seed=3, requests=100)
    used = list(range(5 * PAGE_TOKENS))
    tree.run(used)
    node = tree.node_of(used)
    tree.cache.inc_lock_ref(node)
    before = node.value.clone()
    worker = compactor(tree)
    for _ in range(4):
        worker.empty(20, set(), cold_tokens=PAGES * PAGE_TOKENS)
    assert torch.equal(node.value, before)
    tree.check()
    tree.cache.dec_lock_ref(node)


def test_a_step_is_bounded(tree: ElasticTree) -> None:
    scatter(tree)
    page_map = tree.allocator.page_map
    limit = int(page_map.extent_pages) + 2
    worker = compactor(tree, limit * page_map.page_bytes)
    for _ in range(5):
        moved = worker.totals.moved_pages
        worker.empty(5, set(free_extents(tree)), cold_tokens=0)
        assert worker.totals.moved_pages - moved <= limit
    tree.check()


def test_no_more_is_evicted_than_is_cold(tree: ElasticTree) -> None:
    chat(tree, seed=5, requests=100)
    worker = compactor(tree)
    before = tree.cache.evictable_size()
    worker.empty(5, set(), cold_tokens=3 * PAGE_TOKENS)
    largest = 8 * PAGE_TOKENS  # a leaf is evicted whole
    assert before - tree.cache.evictable_size() <= 3 * PAGE_TOKENS + largest
    tree.check()


def test_the_cold_are_those_not_asked_for_lately(
    tree: ElasticTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache import radix_cache

    clock = iter(range(100, 10_000))
    monkeypatch.setattr(radix_cache.time, "monotonic", lambda: float(next(clock)))
    old, new = list(range(4 * PAGE_TOKENS)), list(range(1000, 1000 + 2 * PAGE_TOKENS))
    tree.run(old)
    tree.run(new)
    worker = compactor(tree)
    since = tree.node_of(new).last_access_time
    assert worker.cold_tokens(since) == len(old)
    assert worker.cold_tokens(since + 1000) == len(old) + len(new)
    tree.cache.inc_lock_ref(tree.node_of(old))
    assert worker.cold_tokens(since) == 0


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_lending_chatting_and_compacting(tree: ElasticTree, seed: int) -> None:
    """Nothing is lost, moved wrongly, or used by two, flushes included."""
    rng = random.Random(seed)
    worker = compactor(tree)
    lent: set[int] = set()
    for _ in range(40):
        match rng.randrange(6):
            case 0 | 1:
                chat(tree, rng.randrange(1 << 20), requests=4)
            case 2:
                worker.empty(rng.randrange(1, 4), lent, cold_tokens=rng.randrange(200))
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
        tree.check()
