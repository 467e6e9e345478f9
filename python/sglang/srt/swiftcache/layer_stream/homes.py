"""The home blocks of window pages: taken at start, renewed, and given back when a donor asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.swiftcache.vacate import Vacater, descendants, subtree
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size
from swiftcache_tier.stream import PageBook

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache
    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

logger = logging.getLogger(__name__)


class HomeKeeper:
    """Which block is whose home. Scheduler thread only."""

    def __init__(self, book: PageBook, pool: DonorKVCache) -> None:
        self._book = book
        self._pool = pool
        self._started = False
        self.retracted = 0
        """Requests that were put back into the queue since pages had lost their homes."""

    def take_all(self) -> None:
        """Give every window page a home; nothing in the pool is in use.

        Pages for which the tier has no block retire, with a warning.

        Raises SwiftCacheError if there is not one block, at the start of a server.
        """
        starting, self._started = not self._started, True
        wanted = self._book.window_pages
        blocks = self._pool.tier.alloc(min(wanted, self._pool.tier.free_blocks))
        assert blocks is not None
        self._book.clear(blocks)
        if len(blocks) < wanted:
            block_bytes = self._pool.block_layout.block_bytes
            missing = (
                f"the layer window of {wanted * self._pool.page_size} tokens needs "
                f"{format_size(wanted * block_bytes)} of donor memory and "
                f"{format_size(len(blocks) * block_bytes)} is lent"
            )
            if starting and len(blocks) == 0:
                raise SwiftCacheError(f"{missing}: lend more or ask for a smaller window")
            logger.warning("%s: the rest of the window waits for donors", missing)

    def settle(self, make_room: Callable[[int], None]) -> None:
        """Retired pages come back when the tier has blocks again. Called at every step.

        make_room: gives up copies until so many blocks are free.
        """
        tier, book = self._pool.tier, self._book
        if book.retired == 0 or tier.must_vacate().size:
            return
        if tier.used_blocks > len(book.homes()):  # the rest are copies
            make_room(book.retired)
        pages = book.retired_pages()[: tier.free_blocks]
        blocks = tier.alloc(len(pages))
        assert blocks is not None
        book.set_homes(pages, blocks)

    def renew(self, pages: np.ndarray) -> bool:
        """Fresh homes for window pages whose old ones stay with a node. False if there are none."""
        blocks = self._pool.tier.alloc(len(pages))
        if blocks is None:
            return False
        self._book.set_homes(pages, blocks)
        return True

    def move_in(self, pages: np.ndarray, blocks: np.ndarray) -> None:
        """Window pages take a node's blocks for homes; their former homes are free."""
        self._pool.release(self._book.set_homes(pages, blocks))

    def blocks_moved(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """The content of blocks is elsewhere now: so are the homes among them."""
        pages = self._book.pages_with_homes_in(sources)
        if pages.size:
            order = np.argsort(sources)
            at = np.searchsorted(sources, self._book.homes_of(pages), sorter=order)
            self._book.set_homes(pages, targets[order[at]])


class StreamVacater(Vacater):
    """Vacates homes too: they move, or their pages retire, or their requests are retracted."""

    def __init__(self, cache: StreamRadixCache) -> None:
        super().__init__(cache)
        self._stream_cache = cache
        self._no_room = False

    def step(self) -> None:
        pool = self._cache.tier_pool
        self._no_room = False
        if pool.tier.must_vacate().size == 0:
            return
        # what the launched forwards read and write must not be moved under them
        self._stream_cache.streamer.wait()
        super().step()
        self._vacate_homes()

    def stranded(self, requests: Sequence[Any]) -> int | None:
        """A request that holds pages whose homes can be neither kept nor moved: its place.

        One at a time, the one with the least output: what it frees may do for the others.
        """
        if not self._no_room:
            return None
        cache = self._stream_cache
        lost = cache.allocator.book.pages_with_homes_in(self._cache.tier_pool.tier.must_vacate())
        found = []
        for place, request in enumerate(requests):
            if request.finished():
                continue
            held = cache.allocator.rows.get(request.req_pool_idx, request.kv.kv_allocated_len)
            if np.isin(held, lost).any():
                found.append(place)
        if found:
            self._no_room = False  # until the next look
        return min(found, key=lambda place: len(requests[place].output_ids), default=None)

    def evict_copies(self, blocks: int) -> None:
        """Give up copies, those that only donors have first, until so many blocks are free."""
        cache, tier = self._stream_cache, self._cache.tier_pool.tier
        if tier.free_blocks < blocks:
            cache.evict_host((blocks - tier.free_blocks) * cache.page_size)
        if tier.free_blocks < blocks:
            self.forget_copies((blocks - tier.free_blocks) * cache.page_size)

    def forget_copies(self, tokens: int) -> None:
        """Give up copies of nodes that are on regular slots, leaf first and coldest first.

        They are recomputed once they have been evicted from the device.
        """
        cache = self._stream_cache
        busy = self.in_flight()
        for node in sorted(descendants(cache.root_node), key=lambda n: n.last_access_time):
            if tokens <= 0:
                return
            below = node.children.values()
            if (
                node.host_value is not None
                and not node.evicted
                and not cache.is_window(node)
                and node not in busy
                and node.host_ref_counter == 0
                and all(cache.is_window(n) or n.host_value is None for n in below)
            ):
                tokens -= len(node.host_value)
                self.forget_copy(node)
                cache._update_host_leaf_status(node)

    def _vacate_homes(self) -> None:
        """Homes of pages that are free, or that a request holds outside the tree."""
        cache, pool = self._stream_cache, self._cache.tier_pool
        book, tier = cache.allocator.book, pool.tier
        pages = book.pages_with_homes_in(tier.must_vacate())
        if pages.size == 0:
            return
        in_tree = self._pages_in_tree()
        held = np.setdiff1d(pages[book.in_use(pages)], in_tree)
        if held.size:
            self._rehome(held)
        self.vacate_free_pages()

    def vacate_free_pages(self) -> None:
        """Nothing in them is worth a copy; a page without a fresh home retires."""
        book, tier = self._stream_cache.allocator.book, self._cache.tier_pool.tier
        pages = book.pages_with_homes_in(tier.must_vacate())
        free = pages[~book.in_use(pages)]
        if free.size:
            self._stream_cache.streamer.wait()
            self.evict_copies(len(free))
            fresh = tier.alloc(min(len(free), tier.free_blocks))
            assert fresh is not None
            tier.free(book.set_homes(free[: len(fresh)], fresh))
            tier.free(book.drop_homes(free[len(fresh) :]))

    def _rehome(self, pages: np.ndarray) -> None:
        """Copy the homes of pages in use to other blocks, as far as there are any."""
        cache, pool = self._stream_cache, self._cache.tier_pool
        book, tier = cache.allocator.book, pool.tier
        self.evict_copies(len(pages))
        if tier.free_blocks < len(pages):
            self._take_from_free_pages(len(pages) - tier.free_blocks)
        count = min(len(pages), tier.free_blocks)
        self._no_room |= count < len(pages)
        targets = tier.alloc(count)
        assert targets is not None
        sources = book.homes_of(pages[:count])
        pool.copy_blocks(sources, targets)
        book.set_homes(pages[:count], targets)
        tier.free(sources)
        cache.stats.moved_blocks += count

    def _take_from_free_pages(self, blocks: int) -> None:
        """Retire free window pages whose homes are not asked back: others need the blocks more."""
        book, tier = self._stream_cache.allocator.book, self._cache.tier_pool.tier
        doomed = book.pages_with_homes_in(tier.must_vacate())
        spare = np.setdiff1d(book.free_window_pages(), doomed)
        tier.free(book.drop_homes(spare[:blocks]))

    def _pages_in_tree(self) -> np.ndarray:
        cache = self._stream_cache
        found = [
            cache.allocator.book.pages_with_homes_in(cache.tier_pool.blocks_of(node.host_value))
            for node in descendants(cache.root_node)
            if cache.is_window(node)
        ]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _blocks_moved(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._stream_cache.homes.blocks_moved(sources, targets)

    def _make_room_for(self, count: int) -> None:
        tier = self._cache.tier_pool.tier
        if tier.free_blocks < count:
            self._take_from_free_pages(count - tier.free_blocks)

    def _give_up(self, node: TreeNode, busy: set[TreeNode]) -> np.ndarray:
        """A node on window slots cannot forget its copy, which is all it has: it is dropped."""
        cache = self._stream_cache
        nodes = list(subtree(node))
        if not any(cache.is_window(below) for below in nodes):
            return super()._give_up(node, busy)
        drop = cache.is_window(node)
        if any(n in busy or n.host_ref_counter > 0 or (drop and n.lock_ref > 0) for n in nodes):
            self._no_room = True
            return self._blocks_of([])
        if not drop:  # what is on window slots keeps its copies, and what continues it there
            nodes = [n for n in nodes if not cache.is_window(n.parent if n.evicted else n)]
        lost = self._blocks_of(nodes)
        for below in reversed(nodes):
            if below.evicted:
                self.drop_subtree(below)
            elif cache.is_window(below):
                cache.drop_window_node(below)
            else:
                self.forget_copy(below)
                cache._update_host_leaf_status(below)
                if drop:
                    cache._evict_regular(below)
        return lost
