"""With checksums on, bytes that changed behind the cache's back are misses and nothing else."""

from __future__ import annotations

import ctypes
import logging
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from srt.test_donor_radix_cache import POLICIES, TreeMachine, filled, prompt

from sglang.srt.swiftcache import verify
from support.kv_tree import LAYERS, NO_BLOCKS, Tree


def verifying(page_size: int = 4, policy: str = "write_through") -> Tree:
    tree = Tree(page_size, pages=16, policy=policy, verify=True)
    tree.tier.join(1, extents=8)
    return tree


def evict_all(tree: Tree) -> None:
    """Off the device, to where the donors have a copy."""
    tree.cache.check_hicache_events()
    tree.cache.evict(EvictParams(num_tokens=tree.tokens_total))


def flip(tree: Tree, block: int, at: int, bits: int = 1) -> None:
    address = int(tree.tier.addresses(np.array([block]))[0])
    ctypes.c_ubyte.from_address(address + at % tree.tier.block_bytes).value ^= bits


def blocks_of(tree: Tree, tokens: list[int]) -> list[int]:
    """The donor block of each page of a prompt that is in the tree as a whole."""
    node, blocks = tree.cache.root_node, []
    while len(blocks) * tree.page_size < len(tokens):
        first = tokens[len(blocks) * tree.page_size]
        node = next(n for n in node.children.values() if n.key.token_ids[0] == first)
        blocks += tree.cache.tier_pool.blocks_of(node.host_value).tolist()
    return blocks


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == verify.__name__]


def check_checksums(tree: Tree) -> None:
    """The blocks in use that have been stored have one, and no others."""
    checksums = tree.cache.tier_pool.checksums
    assert checksums is not None
    queued = [tree.cache.tier_pool.blocks_of(op.host_indices) for op in queued_stores(tree)]
    stored = np.setdiff1d(tree.tier.pool.in_use(), np.concatenate([NO_BLOCKS, *queued]))
    assert len(checksums) == len(stored)
    # A missing one is a KeyError.
    checksums.differ_in_memory(stored, tree.tier.addresses(stored))


def queued_stores(tree: Tree) -> list[CacheOperation]:
    return list(tree.cache.cache_controller.write_queue)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_as_it_was_stored_is_restored(policy: str, page_size: int) -> None:
    tree = verifying(page_size, policy)
    for kind in (0, 0, 1, 1, 2, 2, 3, 3):
        tree.run(prompt(kind, 8, page_size))
    evict_all(tree)
    assert tree.run(prompt(0, 8, page_size)) == 8 * page_size
    assert tree.cache.tier_pool.loaded_bytes == 8 * tree.tier.block_bytes
    assert tree.cache.stats.corrupt_blocks == 0
    check_checksums(tree)
    tree.check()


@pytest.mark.parametrize("page", range(8))
def test_a_hit_ends_before_the_first_corrupt_block(
    page: int, caplog: pytest.LogCaptureFixture
) -> None:
    tree = verifying()
    filled(tree, kinds=1)
    evict_all(tree)
    block = blocks_of(tree, prompt(0, 8, 4))[page]
    flip(tree, block, at=77, bits=0x10)
    with caplog.at_level(logging.WARNING, logger=verify.__name__):
        assert tree.run(prompt(0, 8, 4)) == page * 4
    assert tree.cache.stats.corrupt_blocks == 1
    [line] = warnings(caplog)
    assert "1 of 8 blocks changed in donor memory" in line
    assert f"block {block} of donor donor-1" in line
    assert tree.cache.tier_pool.loaded_bytes == page * tree.tier.block_bytes
    # What was computed anew was stored anew, and is restored.
    evict_all(tree)
    assert tree.run(prompt(0, 8, 4)) == 32
    check_checksums(tree)
    tree.check()


def test_other_prompts_lose_what_lies_behind_a_corrupt_block_and_no_more() -> None:
    tree = verifying()
    filled(tree, kinds=2)
    evict_all(tree)
    flip(tree, blocks_of(tree, prompt(0, 8, 4))[5], at=3)
    assert tree.run(prompt(0, 8, 4)) == 20
    assert tree.run(prompt(1, 8, 4)) == 32
    evict_all(tree)
    flip(tree, blocks_of(tree, prompt(0, 2, 4))[0], at=3)
    assert tree.run(prompt(1, 8, 4)) == 0
    tree.check()


def test_a_block_that_was_moved_keeps_its_checksum() -> None:
    tree = verifying()
    filled(tree, kinds=1)
    evict_all(tree)
    before = blocks_of(tree, prompt(0, 8, 4))
    tree.tier.join(2, extents=8)
    tree.tier.ask_back(1, range(8))
    for _ in range(2):
        tree.cache.check_hicache_events()
    assert not tree.tier.waiting
    after = blocks_of(tree, prompt(0, 8, 4))
    assert not set(before) & set(after)
    check_checksums(tree)
    flip(tree, after[6], at=200)
    assert tree.run(prompt(0, 8, 4)) == 24
    assert tree.cache.stats.corrupt_blocks == 1
    tree.check()


def test_a_block_that_changed_before_it_was_moved_is_not_blessed() -> None:
    tree = verifying()
    filled(tree, kinds=1)
    evict_all(tree)
    flip(tree, blocks_of(tree, prompt(0, 8, 4))[6], at=200)
    tree.tier.join(2, extents=8)
    tree.tier.ask_back(1, range(8))
    for _ in range(2):
        tree.cache.check_hicache_events()
    assert tree.cache.stats.moved_blocks > 0
    assert tree.run(prompt(0, 8, 4)) == 24


def test_a_store_that_went_wrong_is_not_blessed() -> None:
    tree = verifying()
    with mock.patch("swiftcache_kernel.reference.ReferenceTransfer.scatter_all"):
        filled(tree, kinds=1)
        tree.cache.check_hicache_events()
    evict_all(tree)
    assert tree.run(prompt(0, 8, 4)) == 0
    assert tree.cache.stats.corrupt_blocks == 8


class WrongLoads:
    """Changes one byte of what a load brought to the device, in its last layer."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._load = tree.cache.tier_pool.load_to_device_per_layer
        self.next_page: int | None = None
        tree.cache.tier_pool.load_to_device_per_layer = self

    def __call__(
        self,
        pool: object,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer: int,
        backend: str,
    ) -> None:
        self._load(pool, host_indices, device_indices, layer, backend)
        if self.next_page is not None and layer == LAYERS - 1:
            pages = len(device_indices) // self._tree.page_size
            slot = int(device_indices[self.next_page % pages * self._tree.page_size])
            self._tree.pool.v_buffer[layer][slot] += 1
            self.next_page = None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("page", range(8))
def test_a_load_that_went_wrong_is_taken_off_the_device(
    page: int, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = verifying(policy=policy)
    loads = WrongLoads(tree)
    filled(tree, kinds=1)
    filled(tree, kinds=1)
    evict_all(tree)
    loads.next_page = page
    with caplog.at_level(logging.WARNING, logger=verify.__name__):
        assert tree.run(prompt(0, 8, 4)) == page * 4
    [line] = warnings(caplog)
    assert "1 of 8 blocks arrived changed" in line
    assert tree.cache.stats.corrupt_blocks == 1
    assert not tree.cache.ongoing_load_back
    tree.check()
    filled(tree, kinds=1)
    evict_all(tree)
    assert tree.run(prompt(0, 8, 4)) == 32
    check_checksums(tree)
    tree.check()


def test_flush_forgets_all_checksums() -> None:
    tree = verifying()
    filled(tree, kinds=4)
    assert len(tree.cache.tier_pool.checksums) > 0
    assert queued_stores(tree), "the flush does not meet a store that is yet to begin"
    tree.cache.reset()
    tree.allocator.clear()
    assert len(tree.cache.tier_pool.checksums) == 0
    assert not queued_stores(tree)
    filled(tree, kinds=4)
    check_checksums(tree)


def test_without_the_flag_nothing_is_computed_or_kept() -> None:
    tree = Tree(4, pages=16, policy="write_through")
    tree.tier.join(1, extents=8)
    with (
        mock.patch("sglang.srt.swiftcache.verify.page_checksums", side_effect=AssertionError),
        mock.patch("sglang.srt.swiftcache.verify.block_checksums", side_effect=AssertionError),
    ):
        filled(tree, kinds=4)
        assert tree.run(prompt(0, 8, 4)) == 32
    assert tree.cache.tier_pool.checksums is None
    assert tree.cache.status()["corrupt_blocks"] == 0


class VerifyingTreeMachine(TreeMachine):
    """The same life, in which donor memory changes and loads go wrong at any time.

    Every request of the parent checks each byte of what it was given, so whatever is not found
    here fails there.
    """

    verify = True
    loads: WrongLoads | None = None

    @rule(first=st.integers(0, 20), step=st.sampled_from([1, 3, 10]), at=st.integers(0, 511))
    def memory_changes(self, first: int, step: int, at: int) -> None:
        for block in self.tree.tier.pool.in_use()[first::step].tolist():
            flip(self.tree, block, at + block, bits=1 << at % 8)

    @rule(page=st.integers(0, 8))
    def a_load_goes_wrong(self, page: int) -> None:
        self.loads = self.loads or WrongLoads(self.tree)
        self.loads.next_page = page

    @rule(kind=st.integers(0, 5), pages=st.integers(3, 9), step=st.sampled_from([1, 3, 10]))
    def memory_changes_before_a_restore(self, kind: int, pages: int, step: int) -> None:
        tokens = prompt(kind, pages, self.tree.page_size)
        for _ in range(2):  # the second time for the policy that stores what was hit
            self.tree.run(tokens)
        evict_all(self.tree)
        self.memory_changes(kind, step, pages)
        self.tree.run(tokens)

    @invariant()
    def blocks_in_use_have_checksums(self) -> None:
        if hasattr(self, "tree"):
            check_checksums(self.tree)


TestVerifyingTreeMachine = VerifyingTreeMachine.TestCase
TestVerifyingTreeMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
