"""`--swiftcache-ttl`: what nobody has used for so long is forgotten, and nothing else."""

from __future__ import annotations

import time

import pytest

from sglang.srt.swiftcache.expiry import Expiry
from support.kv_tree import Tree

PAGE_SIZE = 4


def conversation(kind: int, pages: int = 4) -> list[int]:
    return [100 + kind] * (pages * PAGE_SIZE)


@pytest.fixture(params=["write_through", "write_back"])
def tree(request: pytest.FixtureRequest) -> Tree:
    """Four conversations, of which the oldest have left the device, where the policy stores."""
    tree = Tree(PAGE_SIZE, pages=10, policy=request.param)
    tree.tier.join(1, extents=64)
    for kind in range(4):
        assert tree.run(conversation(kind)) is not None
    tree.cache.check_hicache_events()
    assert tree.tier.used_blocks > 0
    assert tree.cache.evictable_size() > 0
    return tree


def expiry(tree: Tree) -> Expiry:
    return Expiry(tree.cache, tree.cache._vacater, ttl_s=60.0)


def test_old_conversations_leave_the_device_and_the_donors(tree: Tree) -> None:
    assert expiry(tree).forget_older_than(time.monotonic()) == 4 * 4 * PAGE_SIZE
    assert tree.cache.stats.expired_tokens == 4 * 4 * PAGE_SIZE
    assert tree.tier.used_blocks == 0
    assert tree.cache.evictable_size() == 0
    assert tree.allocator.available_size() == tree.tokens_total
    tree.check()
    assert tree.run(conversation(0)) == 0


def test_a_conversation_that_went_on_stays(tree: Tree) -> None:
    used_s = time.monotonic()
    assert tree.run(conversation(0, 5)) == 4 * PAGE_SIZE
    tree.cache.check_hicache_events()
    expiry(tree).forget_older_than(used_s)
    tree.check()
    assert tree.run(conversation(0, 5)) == 5 * PAGE_SIZE
    assert tree.run(conversation(1)) == 0


def test_what_a_request_is_using_is_never_too_old(tree: Tree) -> None:
    running = tree.start(conversation(0))
    assert running is not None
    expiry(tree).forget_older_than(time.monotonic() + 3600)
    tree.check([running])
    tree.check_content(running.tokens, running.slots)
    tree.finish(running)
    tree.check()


def test_nothing_happens_between_two_looks(tree: Tree) -> None:
    before = tree.tier.used_blocks
    expiry(tree).step()
    assert tree.tier.used_blocks == before
