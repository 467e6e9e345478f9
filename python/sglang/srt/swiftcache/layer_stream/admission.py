"""Which requests may use the window, and how many bytes a step may stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sglang.srt.swiftcache.layer_stream.planning import mark_pages

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache

# SGLang's own limit on the output that it reserves room for.
RESERVED_OUTPUT_TOKENS = 4096

_STREAMS = "swiftcache_streams"


def streams(req: Req) -> bool:
    """Whether a request was admitted as one that does not fit in regular slots."""
    return bool(getattr(req, _STREAMS, False))


class _Claims(NamedTuple):
    """What other requests of a server hold, and how many pages they may yet take."""

    held: list[np.ndarray]
    fitting: int
    """Of requests that fit in regular slots."""
    streaming: int


class Admission:
    """Decides before SGLang's own rules do, whose count of slots takes both kinds together.

    A request that fits in regular slots runs as without a window. Any other one streams, and leaves
    the allocator's ``kept_pages`` to those that fit. The window pages that all requests hold, and
    those that they will when regular pages have run out, are read in every step, so together they
    must keep to ``stream_bytes_per_step``. A request that is over it alone waits until nobody runs
    whom it would slow down; one that does not add to them never waits for it.

    How much output is to come of requests that fit is SGLang's estimate, ``new_token_ratio``.
    """

    def __init__(self, cache: StreamRadixCache) -> None:
        self._cache = cache
        pool = cache.tier_pool
        self._budget_pages = pool.settings.stream_bytes_per_step // pool.block_layout.block_bytes

    def may_run(self, adder: Any, req: Req) -> bool:
        """``adder``: SGLang's PrefillAdder, about to look at ``req``."""
        book = self._cache.allocator.book
        prefix = self._cache.pages_to(req.last_node)
        need, streamed = self._need(req), bool(book.is_window(prefix).any())
        claims = self._claims(adder)
        fits = not streamed and need + claims.fitting + claims.streaming <= book.free_regular
        if not fits:
            held = mark_pages([*claims.held, *self._copied()], book)
            before = self._window_pages(held, claims.fitting, claims.streaming)
            held[prefix] = True
            fits = not streamed and need + claims.fitting <= self._regular_room(held)
            after = self._window_pages(
                held,
                claims.fitting + (need if fits else 0),
                claims.streaming + (0 if fits else need),
            )
            if claims.held and after > before and after > self._budget_pages:
                return False
        setattr(req, _STREAMS, not fits)
        return True

    def _claims(self, adder: Any) -> _Claims:
        cache = self._cache
        held = []
        growth = {True: 0, False: 0}
        for req in adder.running_batch.reqs if adder.running_batch is not None else ():
            if req.req_pool_idx is None or req.kv is None:
                continue  # it has ended
            tokens = req.kv.kv_allocated_len
            held.append(cache.allocator.rows.get(req.req_pool_idx, tokens))
            estimate = 1.0 if streams(req) else adder.new_token_ratio
            end = tokens + _output_to_come(req) * estimate
            growth[streams(req)] += self._pages(end) - self._pages(tokens)
        for req in adder.can_run_list:
            held.append(cache.pages_to(req.last_node))
            growth[streams(req)] += self._need(req)
        return _Claims(held, growth[False], growth[True])

    def _need(self, req: Req) -> int:
        """Pages that a request takes beyond its prefix that is on the device."""
        tokens = len(req.full_untruncated_fill_ids) + _output_to_come(req)
        return self._pages(tokens) - len(req.prefix_indices) // self._cache.page_size

    def _pages(self, tokens: float) -> int:
        return int(-(-tokens // self._cache.page_size))

    def _copied(self) -> Iterable[np.ndarray]:
        """Pages that stay where they are until a copy has been made of them, or into them."""
        cache = self._cache
        nodes = [node for node, _, _ in cache.ongoing_write_through.values()]
        return map(cache.pages_to, [*nodes, *cache.ongoing_load_back.values()])

    def _regular_room(self, held: np.ndarray) -> int:
        """Regular pages that are free, or whose content may be evicted."""
        book = self._cache.allocator.book
        return book.regular_pages - int(np.count_nonzero(held[: book.first_window_page]))

    def _window_pages(self, held: np.ndarray, fitting: int, streaming: int) -> int:
        """Window pages in use once requests have taken so many pages more.

        held: bool, by page.
        """
        allocator = self._cache.allocator
        in_use = int(np.count_nonzero(held[allocator.book.first_window_page :]))
        free = self._regular_room(held)
        left = max(0, free - max(fitting, allocator.kept_pages))
        return in_use + max(0, fitting - free) + max(0, streaming - left)


def _output_to_come(req: Req) -> int:
    left = req.sampling_params.max_new_tokens - len(req.output_ids)
    return min(max(left, 0), RESERVED_OUTPUT_TOKENS)
