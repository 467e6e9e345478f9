"""``--swiftcache-replicas``: a donor that is gone, or a byte that changed, costs no recompute."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from srt.test_donor_radix_cache import SlowTreeMachine, TreeMachine, filled, prompt

from support.kv_tree import Tree


def tree_on_two_donors(page_size: int = 4, *, verify: bool = False) -> Tree:
    tree = Tree(page_size, pages=16, policy="write_through", replicas=2, verify=verify)
    tree.tier.join(1, extents=32)
    tree.tier.join(2, extents=32)
    return tree


def steps(tree: Tree, count: int = 4) -> None:
    for _ in range(count):
        tree.cache.check_hicache_events()


def overwrite(tree: Tree, blocks: np.ndarray) -> None:
    for address in tree.tier.addresses(blocks):
        ctypes.memset(int(address), 0x5A, tree.tier.block_bytes)


def overwrite_donor(tree: Tree, key: int) -> None:
    in_use = tree.tier.pool.in_use()
    overwrite(tree, in_use[tree.tier.donor_of(in_use) == key])


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("lost", [1, 2])
def test_all_prefixes_survive_a_donor_with_nowhere_to_move(page_size: int, lost: int) -> None:
    tree = tree_on_two_donors(page_size)
    filled(tree, kinds=4)
    status = tree.cache.status()["replicas"]
    assert status["copies"] > 0
    assert status["short_blocks"] == 0
    # What lay there is gone before anybody could have copied it.
    overwrite_donor(tree, lost)
    tree.tier.ask_back(lost, range(32))
    steps(tree)
    assert not tree.tier.waiting
    assert tree.cache.stats.blocks_saved_by_copies > 0
    assert tree.cache.stats.lost_blocks == tree.cache.stats.moved_blocks == 0
    for kind in range(4):
        assert tree.run(prompt(kind, 8, page_size)) == 8 * page_size
    tree.check()


def test_copies_are_made_again_when_a_donor_comes() -> None:
    tree = tree_on_two_donors()
    filled(tree, kinds=4)
    tree.tier.ask_back(1, range(32))
    steps(tree)
    assert tree.cache.status()["replicas"]["short_blocks"] > 0
    tree.tier.join(3, extents=32)
    tree.cache._refiller._not_before_s = 0.0
    steps(tree)
    status = tree.cache.status()["replicas"]
    assert status["short_blocks"] == 0
    assert status["refilled_blocks"] > 0
    overwrite_donor(tree, 2)
    tree.tier.ask_back(2, range(32))
    steps(tree)
    for kind in range(4):
        assert tree.run(prompt(kind, 8, 4)) == 32
    tree.check()


def test_refilling_is_bounded_by_step() -> None:
    tree = Tree(4, pages=16, policy="write_through", replicas=2)
    tree.tier.join(1, extents=32)
    filled(tree, kinds=4)
    short = tree.cache.status()["replicas"]["short_blocks"]
    assert short > 2
    pool = tree.cache.tier_pool
    pool.settings = replace(pool.settings, refill_bytes_per_step=2 * tree.tier.block_bytes)
    tree.tier.join(2, extents=32)
    tree.cache._refiller._not_before_s = 0.0
    steps(tree, 1)
    assert tree.cache.status()["replicas"]["short_blocks"] == short - 2


def test_a_full_tier_evicts_rather_than_lose_copies() -> None:
    tree = Tree(4, pages=16, policy="write_through", replicas=2, extent_bytes=4096)
    tree.tier.join(1, extents=3)
    tree.tier.join(2, extents=3)
    for _ in range(3):
        filled(tree, kinds=10)
        tree.check()
    status = tree.cache.status()["replicas"]
    assert tree.tier.used_blocks == 2 * status["copies"]
    assert status["short_blocks"] == 0


def test_a_changed_block_is_read_from_its_copy() -> None:
    tree = tree_on_two_donors(verify=True)
    filled(tree, kinds=4)
    overwrite_donor(tree, 1)
    for kind in range(4):
        assert tree.run(prompt(kind, 8, 4)) == 32
    assert tree.cache.stats.corrupt_blocks > 0
    assert tree.cache.stats.blocks_saved_by_copies == tree.cache.stats.corrupt_blocks
    tree.check()


def test_a_block_whose_copies_have_changed_too_is_recomputed() -> None:
    tree = tree_on_two_donors(verify=True)
    filled(tree, kinds=4)
    overwrite(tree, tree.tier.pool.in_use())
    cached = tree.run(prompt(0, 8, 4))
    assert cached is not None
    assert cached < 32
    tree.check()


class ReplicatedTreeMachine(TreeMachine):
    replicas = 2


class ReplicatedAndVerifiedTreeMachine(TreeMachine):
    replicas = 3
    verify = True


class SlowReplicatedTreeMachine(SlowTreeMachine):
    replicas = 2
    verify = True


for machine in (
    ReplicatedTreeMachine,
    ReplicatedAndVerifiedTreeMachine,
    SlowReplicatedTreeMachine,
):
    machine.TestCase.settings = settings(
        max_examples=30,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
TestReplicatedTreeMachine = ReplicatedTreeMachine.TestCase
TestReplicatedAndVerifiedTreeMachine = ReplicatedAndVerifiedTreeMachine.TestCase
TestSlowReplicatedTreeMachine = SlowReplicatedTreeMachine.TestCase
