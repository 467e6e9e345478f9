"""Which requests may use the window, and how many bytes a step may stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

# SGLang's own limit on the output that it reserves room for.
RESERVED_OUTPUT_TOKENS = 4096


class Admission:
    """Decides before SGLang's own rules do, whose count of slots takes both kinds together.

    A request that fits in regular slots is let through. Any other one streams: the window pages
    that it and the running requests hold are read in every step, so together they must keep to
    ``stream_bytes_per_step``. One that is over it alone waits until nobody runs whom it would
    slow down.
    """

    def __init__(self, cache: StreamRadixCache) -> None:
        self._cache = cache
        pool = cache.tier_pool
        self._block_bytes = pool.block_layout.block_bytes
        self._budget_bytes = pool.settings.stream_bytes_per_step

    def may_run(self, adder: Any, req: Req) -> bool:
        """``adder``: SGLang's PrefillAdder, about to look at ``req``."""
        cache = self._cache
        book, page = cache.allocator.book, cache.page_size
        streamed, unlocked = self._prefix(req.last_node)
        output = max(req.sampling_params.max_new_tokens - len(req.output_ids), 0)
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        need = -(-(tokens + min(output, RESERVED_OUTPUT_TOKENS)) // page) + 1
        reserved = -(-int(adder.rem_total_token_offset) // page)
        if streamed == 0 and need <= book.free_regular - reserved:
            return True
        others = list(adder.running_batch.reqs) if adder.running_batch is not None else []
        others += adder.can_run_list
        if not others:
            return True
        room = max(0, book.free_regular + self._evictable_regular() - unlocked - reserved)
        spilled = max(0, need - room)
        if streamed + spilled == 0:
            return True
        pages = cache.window_pages_of(others, req.last_node) + spilled
        return pages * self._block_bytes <= self._budget_bytes

    def _prefix(self, node: TreeNode) -> tuple[int, int]:
        """Of a prefix on the device: window pages, and regular pages that nobody has locked."""
        cache = self._cache
        streamed = unlocked = 0
        while node is not cache.root_node:
            pages = len(node.key) // cache.page_size
            if cache.is_window(node):
                streamed += pages
            elif node.lock_ref == 0:
                unlocked += pages
            node = node.parent
        return streamed, unlocked

    def _evictable_regular(self) -> int:
        """Regular pages in nodes that nobody has locked."""
        cache = self._cache
        pages = 0
        stack = list(cache.root_node.children.values())
        while stack:
            node = stack.pop()
            if node.evicted:
                continue
            if node.lock_ref == 0 and not cache.is_window(node):
                pages += len(node.key) // cache.page_size
            stack.extend(node.children.values())
        return pages
