"""Where nodes go that are read again: to regular slots, by a copy, or into the window, without."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang.srt.swiftcache.layer_stream.rows import known_pages, with_pages

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

LoadBack = Callable[["TreeNode"], "torch.Tensor | None"]


class WindowLoader:
    """Works on one tree. Scheduler thread only."""

    def __init__(self, cache: StreamRadixCache) -> None:
        self._cache = cache

    def load_back(
        self, node: TreeNode, mem_quota: int | None, to_regular_slots: LoadBack
    ) -> torch.Tensor | None:
        """Bring a node that lives on donors back, with all above it that does.

        Regular slots for as much as there is room for, from the top, window slots for the rest.
        All or nothing: None if there is no room, or too little to load, as in HiCache.
        ``to_regular_slots``: HiCache's own load-back.
        """
        cache = self._cache
        path: list[TreeNode] = []
        top = node
        while top.evicted:
            path.insert(0, top)
            top = top.parent
        tokens = sum(len(part.host_value) for part in path)
        quota = tokens if mem_quota is None else mem_quota
        if tokens < cache.load_back_threshold or tokens > quota:
            return None
        cache.inc_lock_ref(top)
        for part in path:
            part.protect_host()
        try:
            parts = self._divide(path, tokens // cache.page_size)
        finally:
            for part in path:
                part.release_host()
            cache.dec_lock_ref(top)
        if parts is None:
            return None
        to_regular, to_window = parts
        loaded = []
        if to_regular:
            with cache.allocator.regular_only():
                slots = to_regular_slots(to_regular[-1])
            assert slots is not None, "room was made for it"
            loaded.append(slots)
            self._note_pieces(to_regular, slots)
        loaded += [self._take_into_window(part) for part in to_window]
        return torch.cat(loaded)

    def promote(self, req: Req) -> int:
        """Copy what a request is about to read from window to regular slots, as far as those are
        free. Returns the tokens.

        ``req`` has been admitted to the batch that is being built, with which the copies start.
        Left alone are nodes that another request reads, whose slots are in its tables, and those
        that nobody asks for.
        """
        cache = self._cache
        if cache.allocator.book.used_window == 0:
            return 0
        promoted = sum(
            self._promote_node(node)
            for node in self._path(req.last_node)
            if node.lock_ref == 1 and cache.is_window(node)
        )
        if promoted:
            values = [node.value for node in self._path(req.last_node)]
            req.prefix_indices = torch.cat(values)
        return promoted

    def _path(self, node: TreeNode) -> list[TreeNode]:
        """From the top to a node."""
        path: list[TreeNode] = []
        while node is not self._cache.root_node:
            path.insert(0, node)
            node = node.parent
        return path

    def _promote_node(self, node: TreeNode) -> int:
        """Move a window node, or its head, to free regular slots. Returns the tokens."""
        cache = self._cache
        pages = len(node.key) // cache.page_size
        room = min(pages, cache.allocator.book.free_regular - cache.allocator.kept_now)
        if room <= 0:
            return 0
        if room < pages:
            node = cache._split_node(node.key, node, room * cache.page_size)
        window_slots = node.value
        if not cache.renew_homes(known_pages(window_slots)):
            return 0
        with cache.allocator.regular_only():
            slots = cache.cache_controller.load(host_indices=node.host_value, node_id=node.id)
        assert slots is not None, "so many pages are free"
        node.value = slots
        cache.allocator.free(window_slots)
        # until the copy has completed
        cache.ongoing_load_back[node.id] = node
        cache.inc_lock_ref(node)
        return len(node.key)

    def _divide(
        self, path: list[TreeNode], pages: int
    ) -> tuple[list[TreeNode], list[TreeNode]] | None:
        """Which nodes go to regular and which to window slots; room has been made for both.

        The node at the border is split. None if there is no room.
        """
        cache, book = self._cache, self._cache.allocator.book
        kept = cache.allocator.kept_now
        if book.free_regular < pages + kept:
            cache.make_regular_room(pages + kept - book.free_regular)
        room = min(pages, book.free_regular - kept)
        least = -(-cache.load_back_threshold // cache.page_size)
        if room < least:
            room = 0
        if pages - room > book.free_window:
            self._make_window_room(pages - room - book.free_window)
        if pages - room > book.free_window:  # rather the kept ones than none
            room = max(pages - book.free_window, least)
        if room > book.free_regular:
            return None
        to_regular: list[TreeNode] = []
        for at, part in enumerate(path):
            mine = len(part.key) // cache.page_size
            if mine > room:
                rest = path[at:]
                if room:
                    # the head is a node of its own now, in front of what is left of this one
                    to_regular.append(cache._split_node(part.key, part, room * cache.page_size))
                return to_regular, rest
            to_regular.append(part)
            room -= mine
        return to_regular, []

    def _make_window_room(self, pages: int) -> None:
        """Evict window nodes, least recently used first, until so many pages more are free."""
        cache, book = self._cache, self._cache.allocator.book
        wanted = book.free_window + pages
        heap = cache._make_eviction_heap()
        while heap and book.free_window < wanted:
            _, node = heapq.heappop(heap)
            if node.lock_ref == 0 and cache.is_window(node):
                cache._evict_backuped(node)
                cache._promote_parent(node, heap)

    def _note_pieces(self, nodes: list[TreeNode], slots: torch.Tensor) -> None:
        """HiCache gave nodes pieces of ``slots``: note their pages."""
        pages = known_pages(slots)
        at = 0
        for node in nodes:
            count = len(node.key) // self._cache.page_size
            with_pages(node.value, pages[at : at + count])
            at += count

    def _take_into_window(self, node: TreeNode) -> torch.Tensor:
        """Put a node that lives on donors on window slots: its blocks become their homes."""
        cache = self._cache
        blocks = cache.tier_pool.blocks_of(node.host_value)
        cache.tier_pool.traffic.hit(blocks)
        pages = cache.allocator.book.take_window(len(blocks))
        cache.homes.move_in(pages, blocks)
        node.value = cache.allocator.slots_of(pages)
        cache.evictable_size_ += len(node.value)
        for changed in (node, node.parent):
            if changed is not cache.root_node:
                cache._update_leaf_status(changed)
                cache._update_host_leaf_status(changed)
        value: torch.Tensor = node.value
        return value
