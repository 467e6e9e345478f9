"""Which nodes have copies where donors lend less than the device pool holds twice over."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.swiftcache.cold_copies import ColdCopies
from support.kv_tree import Tree

PAGE = 4
POOL_PAGES = 16
PAGE_BYTES = 512


def new_tree(tier_pages: int, policy: str = "write_through") -> Tree:
    tree = Tree(PAGE, pages=POOL_PAGES, policy=policy, extent_bytes=tier_pages * PAGE_BYTES)
    assert tree.tier.block_bytes == PAGE_BYTES
    tree.tier.join(1, extents=1)
    assert tree.tier.total_blocks == tier_pages
    return tree


def chooser(tree: Tree) -> ColdCopies:
    found = tree.cache._cold_copies
    assert found is not None
    return found


def conversation(kind: int, pages: int = 4) -> list[int]:
    return [100 + kind] * (pages * PAGE)


def hold(tree: Tree, conversations: int, rounds: int) -> int:
    """Take turns; returns the tokens of the last round that were there already."""
    for _ in range(rounds):
        cached = 0
        for kind in range(conversations):
            found = tree.run(conversation(kind))
            assert found is not None
            cached += found
            look(tree, times=2)
    return cached


def test_a_tier_smaller_than_the_device_pool_adds_half_of_itself_to_it() -> None:
    tree = new_tree(tier_pages=8)
    # 20 pages in turns, LRU in both tiers: a cache of fewer would have none of them
    assert hold(tree, conversations=5, rounds=4) == 5 * 4 * PAGE
    assert tree.cache.tier_pool.loaded_bytes > 0
    assert tree.cache.stats.cold_copy_tokens > 0


def test_a_tier_as_large_as_the_device_pool_adds_half_of_itself_to_it() -> None:
    tree = new_tree(tier_pages=16)
    assert hold(tree, conversations=6, rounds=4) == 6 * 4 * PAGE


def test_everything_has_a_copy_at_once_while_there_is_room() -> None:
    tree = new_tree(tier_pages=8)
    tree.run(conversation(0))
    tree.run(conversation(1))
    assert tree.tier.used_blocks == 8
    assert all(node.backuped for node in tree.nodes())
    assert tree.cache.stats.cold_copy_tokens == 0
    tree.run(conversation(2))
    assert [node.backuped for node in sorted(tree.nodes(), key=lambda n: n.last_access_time)] == [
        True,
        True,
        False,
    ]


def test_everything_has_a_copy_at_once_in_a_tier_of_twice_the_device_pool() -> None:
    tree = new_tree(tier_pages=2 * POOL_PAGES)
    for _ in range(2):
        for kind in range(9):  # 36 pages
            tree.run(conversation(kind))
            tree.cache.check_hicache_events()
            assert all(node.backuped for node in tree.nodes())
    assert tree.cache.stats.cold_copy_tokens == tree.cache.stats.forgotten_copy_tokens == 0


def look(tree: Tree, times: int) -> None:
    """Choose again, with all that was stored complete."""
    for _ in range(times):
        tree.cache.check_hicache_events()
        chooser(tree).store_coldest()
    tree.cache.check_hicache_events()
    tree.check()


def copied(tree: Tree) -> set[int]:
    """Conversations, of one node each, that have a copy."""
    return {node.key.token_ids[0] - 100 for node in tree.nodes() if node.backuped}


def test_the_hottest_copies_make_room_for_the_coldest() -> None:
    tree = new_tree(tier_pages=8)
    for kind in (0, 1, 2, 3, 0, 1):
        tree.run(conversation(kind))
    assert copied(tree) == {0, 1}
    tree.cache.check_hicache_events()
    chooser(tree).store_coldest()
    assert copied(tree) == {0, 2}
    assert tree.cache.stats.forgotten_copy_tokens == 4 * PAGE
    assert tree.cache.stats.cold_copy_tokens == 4 * PAGE
    tree.cache.check_hicache_events()
    tree.check()


def test_a_step_stores_no_more_than_it_may() -> None:
    tree = new_tree(tier_pages=8)
    pool = tree.cache.tier_pool
    pool.settings = replace(pool.settings, cold_copy_bytes_per_step=1)
    tree.run(conversation(0))
    tree.run(conversation(1))
    for kind in (2, 3):
        tree.run(conversation(kind, pages=2))
    tree.run(conversation(0))
    tree.run(conversation(1))
    for stored in (1, 2):
        tree.cache.check_hicache_events()
        chooser(tree).store_coldest()
        assert tree.cache.stats.cold_copy_tokens == stored * 2 * PAGE, "a node is the least"
    assert copied(tree) == {0, 2, 3}
    tree.cache.check_hicache_events()
    tree.check()


def test_what_was_used_too_seldom_for_the_policy_gets_no_copy() -> None:
    tree = new_tree(tier_pages=8, policy="write_through_selective")
    for kind in (0, 1, 0, 1, 2, 3, 3, 0, 1):
        tree.run(conversation(kind))
    assert copied(tree) == {0, 1}
    tree.cache.check_hicache_events()
    chooser(tree).store_coldest()
    assert copied(tree) == {0, 1}, "2 is the coldest"
    tree.run(conversation(2))
    chooser(tree).store_coldest()
    assert copied(tree) == {0, 3}, "3 is, and has been used twice"
    tree.cache.check_hicache_events()
    tree.check()


def test_a_copy_waits_for_those_of_the_prefix_it_continues() -> None:
    tree = new_tree(tier_pages=8)
    tree.run(conversation(0))
    tree.run(conversation(1))
    tree.run(conversation(2, pages=2))
    tree.run(conversation(2, pages=2) + conversation(3, pages=1))
    tree.run(conversation(2, pages=2) + conversation(4, pages=1))
    tree.run(conversation(0))
    tree.run(conversation(1))
    look(tree, times=2)
    assert copied(tree) == {0, 2, 3, 4}


def test_what_was_computed_without_donors_gets_copies_when_one_comes() -> None:
    tree = Tree(PAGE, pages=POOL_PAGES, policy="write_through", extent_bytes=2 * 8192)
    for kind in range(3):
        tree.run(conversation(kind))
    chooser(tree).step()
    assert copied(tree) == set()
    tree.tier.join(1, extents=1)
    look(tree, times=3)
    assert copied(tree) == {0, 1, 2}


def test_copies_lost_with_a_donor_are_made_again_when_one_comes() -> None:
    tree = Tree(PAGE, pages=POOL_PAGES, policy="write_through", extent_bytes=2 * 8192)
    tree.tier.join(1, extents=1)
    for kind in range(3):
        tree.run(conversation(kind))
    tree.cache.check_hicache_events()
    assert copied(tree) == {0, 1, 2}
    tree.tier.lose(1, [0])
    tree.cache.check_hicache_events()
    assert copied(tree) == set()
    tree.tier.join(2, extents=1)
    assert chooser(tree)._some_without
    look(tree, times=3)
    assert copied(tree) == {0, 1, 2}


def test_of_a_node_longer_than_half_of_the_tier_the_head_is_stored_and_nothing_lost() -> None:
    tree = new_tree(tier_pages=8)
    tree.run(conversation(9, pages=10))  # no room for a copy
    for kind in (0, 1, 2):
        tree.run(conversation(kind, pages=2))
    look(tree, times=4)
    assert {(n.key.token_ids[0] - 100, len(n.key) // PAGE) for n in tree.nodes() if n.backuped} >= {
        (9, 4)
    }
    for kind in (3, 4):  # the long one leaves the device
        tree.run(conversation(kind))
        look(tree, times=2)
    assert any(node.evicted for node in tree.nodes())
    assert tree.run(conversation(9, pages=4)) == 4 * PAGE
    tree.check()


def test_what_cannot_be_stored_costs_no_other_its_copy() -> None:
    tree = new_tree(tier_pages=8)
    for kind in (0, 1):
        tree.run(conversation(kind))
    tree.cache.check_hicache_events()
    tree.run(conversation(2))
    tree.run(conversation(3))
    protected = [node for node in tree.nodes() if node.backuped]
    for node in protected:
        node.protect_host()
    look(tree, times=3)
    assert copied(tree) == {0, 1}
    assert tree.cache.stats.forgotten_copy_tokens == 0
    for node in protected:
        node.release_host()
    tree.check()


def test_a_shared_prefix_keeps_its_copy_while_what_continues_it_is_stored() -> None:
    """It is the hottest of all, and its copy is what those of the others hang on."""
    tree = new_tree(tier_pages=8)

    def branch(kind: int, pages: int) -> list[int]:
        return [50] * (2 * PAGE) + conversation(kind, pages)

    for kind, pages in ((1, 2), (2, 2), (3, 7), (1, 2), (2, 2)):
        tree.run(branch(kind, pages))
        tree.cache.check_hicache_events()
    look(tree, times=4)
    stored = tree.cache.tier_pool.stored_bytes
    look(tree, times=4)
    assert tree.cache.tier_pool.stored_bytes == stored, "nothing is stored again and again"
    assert {n.key.token_ids[0] for n in tree.nodes() if n.backuped} >= {50}


def test_write_back_stores_what_is_evicted_as_before() -> None:
    assert new_tree(tier_pages=8, policy="write_back").cache._cold_copies is None
