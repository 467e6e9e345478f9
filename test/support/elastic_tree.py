"""A radix tree over a small elastic pool, in which every page tells whose it must be."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang.srt.swiftcache.cold_prefixes import ColdPrefixes
from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool

PAGE_TOKENS = 4
LAYERS = 2


class ElasticTree:
    """SGLang's own tree, driven as its scheduler does; extents are set by SWIFTCACHE_EXTENT_BYTES.

    The bytes of a page are a function of the whole prefix up to its end, as KV is.
    """

    def __init__(self, pages: int, head_dim: int = 8, eviction_policy: str = "lru") -> None:
        """``pages`` beside page 0. With ``head_dim`` 8 a page has 512 bytes, with 10 it has 640."""
        size = pages * PAGE_TOKENS
        self.pool = ElasticKVPool(
            size,
            page_size=PAGE_TOKENS,
            dtype=torch.float32,
            head_num=1,
            head_dim=head_dim,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        stock = PagedTokenToKVPoolAllocator(
            size, PAGE_TOKENS, torch.float32, "cpu", self.pool, need_sort=False
        )
        self.allocator = ElasticAllocator(stock, self.pool)
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE_TOKENS,
                eviction_policy=eviction_policy,
            )
        )
        self.size = size

    def close(self) -> None:
        self.pool.memory.close()

    def run(self, tokens: Sequence[int]) -> bool:
        """A request of whole pages, from match to finish. False if it does not fit."""
        match = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        cached = match.device_indices
        self._check(tokens[: len(cached)], cached)
        self.cache.inc_lock_ref(match.last_device_node)
        try:
            rest = len(tokens) - len(cached)
            if self.allocator.available_size() < rest:
                self.cache.evict(EvictParams(num_tokens=rest - self.allocator.available_size()))
            fresh = self.allocator.alloc(rest) if rest else cached[:0]
            if fresh is None:
                return False
            slots = torch.cat([cached, fresh])
            for page, content in zip(*_pages(tokens, slots), strict=True):
                self.pool.raw_pages[page] = content
            result = self.cache.insert(InsertParams(key=_key(tokens), value=slots))
            self.allocator.free(slots[len(cached) : result.prefix_len])
        finally:
            self.cache.dec_lock_ref(match.last_device_node)
        return True

    def has(self, tokens: Sequence[int]) -> bool:
        """Whether all of a prefix is cached; asks for it."""
        match = self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))
        return len(match.device_indices) == len(tokens)

    def node_of(self, tokens: Sequence[int]) -> TreeNode:
        """The node where a prefix that is cached ends."""
        node: TreeNode = self.cache.match_prefix(
            MatchPrefixParams(key=_key(tokens))
        ).last_device_node
        return node

    def check(self) -> None:
        """Every node's pages hold what was computed, and every page has exactly one owner."""
        pages: list[int] = []
        stack = [(child, list[int]()) for child in self.cache.root_node.children.values()]
        while stack:
            node, before = stack.pop()
            tokens = before + list(node.key.token_ids)
            self._check(tokens, node.value, len(before))
            pages += (node.value[::PAGE_TOKENS] // PAGE_TOKENS).tolist()
            stack += [(child, tokens) for child in node.children.values()]
        free = self.allocator.free_mask().nonzero()[0].tolist()
        held = self.allocator.page_map.held.tolist()
        everything = sorted(pages + free + held)
        assert everything == list(range(1, self.size // PAGE_TOKENS + 1))
        cached = self.cache.evictable_size() + self.cache.protected_size()
        assert cached == len(pages) * PAGE_TOKENS
        assert self.allocator.available_size() + cached + self.allocator.held_tokens == self.size

    def _check(self, tokens: Sequence[int], slots: torch.Tensor, start: int = 0) -> None:
        for page, content in zip(*_pages(tokens, slots, start), strict=True):
            assert torch.all(self.pool.raw_pages[page] == content), f"page {page} holds other KV"


def look_through(cold: ColdPrefixes, before_s: float) -> None:
    """Have it look through the whole tree, and find cold what was last asked for before then."""
    cold._next_s = 0.0
    now_s = before_s + cold._settings.cold_after_s
    cold.look(now_s)
    while cold._stack:
        cold.look(now_s)


def _pages(
    tokens: Sequence[int], slots: torch.Tensor, start: int = 0
) -> tuple[list[int], list[int]]:
    """Pages of the slots of ``tokens[start:]``, and the byte that each must be full of."""
    pages = (slots[::PAGE_TOKENS] // PAGE_TOKENS).tolist()
    ends = range(start + PAGE_TOKENS, len(tokens) + 1, PAGE_TOKENS)
    digests = [hashlib.blake2b(str(tokens[:end]).encode(), digest_size=1).digest() for end in ends]
    return pages, [digest[0] for digest in digests]


def _key(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(token_ids=array("q", tokens), extra_key=None)
