"""What is cold is counted a slice at a time, and goes before anything that is not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang.srt.swiftcache.cold_prefixes import ColdPrefixes
from support.elastic_tree import PAGE_TOKENS, ElasticTree, look_through
from swiftcache_tier.settings import Settings

PAGES = 95
EVERYTHING = PAGES * PAGE_TOKENS


@pytest.fixture(params=["lru", "lfu", "mru", "filo"])
def tree(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticTree]:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    tree = ElasticTree(PAGES, eviction_policy=request.param)
    yield tree
    tree.close()


@pytest.fixture
def cold(tree: ElasticTree) -> ColdPrefixes:
    return ColdPrefixes(tree.cache, tree.allocator, Settings())


def prompts(count: int, pages: int, first: int = 0) -> list[list[int]]:
    """That have nothing in common."""
    return [[n] * pages * PAGE_TOKENS for n in range(first, first + count)]


def run_all(tree: ElasticTree, some: list[list[int]]) -> float:
    """Returns a time after which none of them was asked for."""
    for prompt in some:
        assert tree.run(prompt)
    return time.monotonic()


def test_all_that_is_cold_goes_and_nothing_else(tree: ElasticTree, cold: ColdPrefixes) -> None:
    old, new = prompts(9, pages=5), prompts(9, pages=5, first=100)
    since = run_all(tree, old + old)
    run_all(tree, new)
    look_through(cold, since)
    assert cold.tokens == 45 * PAGE_TOKENS
    assert cold.evict(EVERYTHING) == 45 * PAGE_TOKENS
    assert cold.tokens == 0
    assert tree.allocator.available_size() == 50 * PAGE_TOKENS
    tree.check()
    assert all(tree.has(prompt) for prompt in new)


def test_the_oldest_goes_first_with_what_hangs_on_it(tree: ElasticTree, cold: ColdPrefixes) -> None:
    shared = [1] * 2 * PAGE_TOKENS
    oldest, younger = [[*shared, *[n] * 3 * PAGE_TOKENS] for n in (2, 3)]
    run_all(tree, [oldest, younger])
    since = run_all(tree, prompts(1, pages=4, first=9))
    look_through(cold, since)
    for left in (9, 6, 4):
        evicted = cold.evict(1)
        assert evicted > 0
        assert cold.tokens == left * PAGE_TOKENS if left != 9 else evicted == 3 * PAGE_TOKENS
    tree.check()


def test_a_prefix_that_a_request_goes_on_with_is_not_cold(
    tree: ElasticTree, cold: ColdPrefixes
) -> None:
    old = prompts(3, pages=5)
    look_through(cold, run_all(tree, old))
    assert cold.tokens == 15 * PAGE_TOKENS
    cold.note_use(tree.node_of(old[1]))
    assert cold.tokens == 10 * PAGE_TOKENS
    assert cold.evict(EVERYTHING) == 10 * PAGE_TOKENS
    assert tree.has(old[1])


def test_a_use_of_the_beginning_of_a_node_counts_for_all_of_it(
    tree: ElasticTree, cold: ColdPrefixes
) -> None:
    old = prompts(3, pages=5)
    look_through(cold, run_all(tree, old))
    cold.note_use(tree.node_of(old[1][: 2 * PAGE_TOKENS]))
    assert cold.tokens == 10 * PAGE_TOKENS


def test_a_use_while_the_tree_is_looked_through_counts(tree: ElasticTree) -> None:
    cold = ColdPrefixes(tree.cache, tree.allocator, Settings(cold_scan_nodes_per_step=2))
    old = prompts(3, pages=5)
    since = run_all(tree, old)
    now_s = since + Settings().cold_after_s
    cold.look(now_s)
    assert cold.tokens == 0, "two of three nodes were seen"
    used = next(iter(cold._ahead.cold))
    tree.node_of(used.key.token_ids.tolist())
    cold.note_use(used)
    cold.look(now_s)
    assert cold.tokens == 10 * PAGE_TOKENS


def test_what_was_used_unseen_is_not_evicted(tree: ElasticTree, cold: ColdPrefixes) -> None:
    old = prompts(3, pages=5)
    look_through(cold, run_all(tree, old))
    assert tree.has(old[0])
    assert cold.evict(EVERYTHING) == 10 * PAGE_TOKENS
    assert tree.has(old[0])


def test_what_a_request_uses_is_not_cold(tree: ElasticTree, cold: ColdPrefixes) -> None:
    old = prompts(3, pages=5)
    since = run_all(tree, old)
    node = tree.node_of(old[0])
    tree.cache.inc_lock_ref(node)
    look_through(cold, time.monotonic())
    assert cold.tokens == 10 * PAGE_TOKENS
    tree.cache.dec_lock_ref(node)
    look_through(cold, time.monotonic())
    assert cold.tokens == 15 * PAGE_TOKENS
    tree.cache.inc_lock_ref(node)
    assert cold.evict(EVERYTHING) == 10 * PAGE_TOKENS
    assert since < time.monotonic()


def test_what_sglang_has_evicted_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    tree = ElasticTree(PAGES)
    cold = ColdPrefixes(tree.cache, tree.allocator, Settings())
    shared = [7] * 2 * PAGE_TOKENS
    since = run_all(tree, [[*shared, *prompt] for prompt in prompts(3, pages=5)])
    run_all(tree, prompts(2, pages=5, first=100))
    look_through(cold, since)
    assert cold.tokens == 17 * PAGE_TOKENS
    tree.cache.evict(EvictParams(num_tokens=10 * PAGE_TOKENS))
    assert cold.tokens == 7 * PAGE_TOKENS
    tree.cache.evict(EvictParams(num_tokens=7 * PAGE_TOKENS))
    assert cold.tokens == 0
    tree.close()


def test_after_a_flush_nothing_is_cold(tree: ElasticTree, cold: ColdPrefixes) -> None:
    look_through(cold, run_all(tree, prompts(3, pages=5)))
    tree.cache.reset()
    tree.allocator.clear()
    assert cold.tokens == 0
    assert cold.evict(EVERYTHING) == 0
    tree.check()


def test_a_look_goes_on_where_it_was_and_the_next_begins_in_its_time(tree: ElasticTree) -> None:
    settings = Settings(cold_scan_nodes_per_step=2)
    cold = ColdPrefixes(tree.cache, tree.allocator, settings)
    now_s = run_all(tree, prompts(5, pages=1)) + settings.cold_after_s
    for expected in (0, 0, 5):
        cold.look(now_s)
        assert cold.tokens == expected * PAGE_TOKENS
    first = cold.last_look
    cold.look(now_s)
    assert cold._stack == [], "it is too early"
    for _ in range(3):
        cold.look(now_s + settings.cold_scan_s)
    assert cold.last_look is not first
    assert cold.tokens == 5 * PAGE_TOKENS
