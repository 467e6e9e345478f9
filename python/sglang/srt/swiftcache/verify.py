"""``--swiftcache-verify``: a block that is not what was stored is a miss, never a wrong token.

On store, the checksum of a block is taken from the pages of the device pool that it is made from,
so a store that goes wrong is found too. On load it is checked twice: in donor memory before
anything is queued, so that the hit ends before the first bad block; and in the device pool after
the copy has completed, before a request is given the pages, so that neither a wrong copy nor a
byte that changed since the first look gets through. Blocks that were moved between donors keep the
checksum of their store. Where a block has copies (``--swiftcache-replicas``), one that is right is
read in its place.

The price: a load does not overlap the forward, every block is read once more on store and twice
more on load, and a checksum takes some 100 bytes of host memory a block. With the flag off,
nothing here is built.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from swiftcache_kernel import PoolBuffers, block_checksums, page_checksums
from swiftcache_tier.blocks import NONE

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache
    from sglang.srt.swiftcache.vacate import Vacater

logger = logging.getLogger(__name__)

LOGGED_BLOCKS = 8


class _Stored(NamedTuple):
    """Checksums on their way from the device."""

    blocks: np.ndarray  # int64 [n]
    sums: torch.Tensor  # int64 [n] on the host, final once `done` has completed
    done: torch.cuda.Event


class BlockChecksums:
    """What the checksum of every block in use must be, by block id. Scheduler thread only."""

    def __init__(self, buffers: PoolBuffers) -> None:
        """On a GPU, compiles the kernels first (some seconds the first time on a machine)."""
        self._buffers = buffers
        self._sums: dict[int, int] = {}
        self._stored: deque[_Stored] = deque()
        if buffers.device.type == "cuda":
            from swiftcache_kernel.triton_checksum import compile_checksums

            compile_checksums(buffers)

    def record(self, blocks: np.ndarray, pages: torch.Tensor) -> None:
        """``pages`` are being stored to ``blocks``, on the current stream: int64 [n] both.

        Does not wait: the checksums follow the store on its stream.
        """
        sums = page_checksums(pages, self._buffers)
        if not sums.is_cuda:
            self._enter(blocks, sums)
            return
        on_host = torch.empty(len(blocks), dtype=torch.int64, pin_memory=True)
        on_host.copy_(sums, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._stored.append(_Stored(blocks, on_host, done))
        self._settle()

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """The content of ``sources`` goes on in ``targets``; both int64 [n]."""
        self._settle()
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._sums[target] = self._sums.pop(source)

    def forget(self, blocks: np.ndarray) -> None:
        """The blocks are free."""
        self._settle()
        for block in blocks.tolist():
            del self._sums[block]

    def clear(self) -> None:
        """All blocks are free; the transfers have completed."""
        self._stored.clear()
        self._sums.clear()

    def __len__(self) -> int:
        self._settle()
        return len(self._sums)

    def differ_in_memory(self, blocks: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """Which blocks are not what was stored, where they lie: bool [n]. Waits for the answer."""
        table = torch.from_numpy(addresses).to(self._buffers.device)
        return self._differ(blocks, block_checksums(table, self._buffers.layout))

    def differ_in_pool(self, blocks: np.ndarray, pages: torch.Tensor) -> np.ndarray:
        """Which pages are not what was stored to their blocks: bool [n]. Waits for the answer."""
        return self._differ(blocks, page_checksums(pages, self._buffers))

    def _differ(self, blocks: np.ndarray, found: torch.Tensor) -> np.ndarray:
        self._settle()
        expected = [self._sums[block] for block in blocks.tolist()]
        differ: np.ndarray = found.cpu().numpy() != np.array(expected, dtype=np.int64)
        return differ

    def _settle(self) -> None:
        """Take in the checksums of completed stores, without waiting.

        The tree reads, moves and frees a block only once its store is acknowledged, by an event
        that follows ours on the same stream.
        """
        while self._stored and self._stored[0].done.query():
            stored = self._stored.popleft()
            self._enter(stored.blocks, stored.sums)

    def _enter(self, blocks: np.ndarray, sums: torch.Tensor) -> None:
        self._sums.update(zip(blocks.tolist(), sums.tolist(), strict=True))


class LoadVerifier:
    """Checks what one tree loads from donors. Scheduler thread only.

    A hit ends before its first bad block, and the nodes from there on are dropped from the tree.
    """

    def __init__(self, cache: DonorRadixCache, vacater: Vacater, checksums: BlockChecksums) -> None:
        self._cache = cache
        self._vacater = vacater
        self._checksums = checksums

    def before_load(self, params: InitLoadBackParams) -> InitLoadBackParams:
        """Look at the blocks in donor memory; returns what is left to load."""
        path: list[TreeNode] = []
        node = params.best_match_node
        while node.evicted:
            path.insert(0, node)
            node = node.parent
        if not path:
            return params
        blocks = self._blocks(path)
        addresses = self._cache.tier_pool.tier.addresses(blocks)
        differ = self._checksums.differ_in_memory(blocks, addresses)
        if not differ.any():
            return params
        self._use_copies(path, blocks, differ)
        if not differ.any():
            return params
        last_node = self._drop(path, blocks, differ, "changed in donor memory")
        good_tokens = int(differ.argmax()) * self._cache.page_size
        return replace(params, best_match_node=last_node, host_hit_length=good_tokens)

    def after_load(
        self, loaded: torch.Tensor, last_node: TreeNode
    ) -> tuple[torch.Tensor, TreeNode]:
        """Complete the load that has just been queued and look at what arrived.

        loaded: device slots, int64 [tokens], of the nodes that end with ``last_node``. Returns
        those to use and the node that they end with.
        """
        if len(loaded) == 0:
            return loaded, last_node
        cache, controller = self._cache, self._cache.cache_controller
        controller.start_loading()
        controller.ack_load_queue[-1].finish_event.synchronize()
        cache.loading_check(finish_count=len(controller.ack_load_queue))

        path: list[TreeNode] = []
        node, tokens = last_node, 0
        while tokens < len(loaded):
            path.insert(0, node)
            tokens += len(node.value)
            node = node.parent
        blocks = self._blocks(path)
        pages = loaded.view(-1, cache.page_size)[:, 0] // cache.page_size
        differ = self._checksums.differ_in_pool(blocks, pages)
        if not differ.any():
            return loaded, last_node
        last_node = self._drop(path, blocks, differ, "arrived changed")
        return loaded[: int(differ.argmax()) * cache.page_size], last_node

    def _use_copies(self, path: list[TreeNode], blocks: np.ndarray, differ: np.ndarray) -> None:
        """Put a copy that is right in the place of each bad block that has one.

        ``blocks`` of ``path``, from end to end, and ``differ`` are brought up to date.
        """
        pool = self._cache.tier_pool
        if pool.replicas is None:
            return
        for column in range(pool.copies_wanted - 1):
            places = np.flatnonzero(differ)
            copies = pool.replicas.of(blocks[places])[:, column]
            places, copies = places[copies != NONE], copies[copies != NONE]
            if len(places) == 0:
                continue
            wrong = self._checksums.differ_in_memory(blocks[places], pool.tier.addresses(copies))
            self._report(
                blocks, places[~wrong], "changed in donor memory", "a copy of each is read instead"
            )
            pool.use_copies(blocks[places[~wrong]], copies[~wrong])
            blocks[places[~wrong]] = copies[~wrong]
            differ[places[~wrong]] = False
            self._cache.stats.blocks_saved_by_copies += int(np.count_nonzero(~wrong))
        ends = np.cumsum([len(node.key) // self._cache.page_size for node in path])
        for node, own in zip(path, np.split(blocks, ends[:-1]), strict=True):
            node.host_value = pool.slots_of(own)

    def _blocks(self, path: list[TreeNode]) -> np.ndarray:
        blocks_of = self._cache.tier_pool.blocks_of
        return np.concatenate([blocks_of(node.host_value) for node in path])

    def _drop(
        self, path: list[TreeNode], blocks: np.ndarray, differ: np.ndarray, what: str
    ) -> TreeNode:
        """Drop all from the first block that differs. Returns the node that now ends the path.

        ``path``: unlocked nodes, each the parent of the next, with ``blocks`` from end to end.
        """
        cache = self._cache
        good_tokens = int(differ.argmax()) * cache.page_size
        tokens = (len(blocks) - int(differ.argmax())) * cache.page_size
        places = np.flatnonzero(differ)
        self._report(blocks, places, what, f"{tokens} tokens of the hit are recomputed")
        ends = np.cumsum([len(node.key) for node in path])
        place = int(np.searchsorted(ends, good_tokens, side="right"))
        node = path[place]
        good_of_node = good_tokens - int(ends[place]) + len(node.key)
        if good_of_node:
            cache._split_node(node.key, node, good_of_node)
        for below in reversed(path[place:]):
            if not below.evicted:
                cache._evict_backuped(below)
        parent: TreeNode = node.parent
        self._vacater.drop_subtree(node)
        return parent

    def _report(self, blocks: np.ndarray, places: np.ndarray, what: str, remedy: str) -> None:
        if len(places) == 0:
            return
        bad = blocks[places]
        self._cache.stats.corrupt_blocks += len(bad)
        tier = self._cache.tier_pool.tier
        names = tier.donor_names()
        where = [
            f"{block} of donor {names[key]}"
            for block, key in zip(bad.tolist(), tier.donor_of(bad).tolist(), strict=True)
        ]
        logger.warning(
            "SwiftCache verify: %d of %d blocks %s (block %s%s): %s",
            len(bad),
            len(blocks),
            what,
            ", ".join(where[:LOGGED_BLOCKS]),
            ", ..." if len(bad) > LOGGED_BLOCKS else "",
            remedy,
        )
