"""A radix tree over a small KV pool whose every byte can be checked.

The KV of a token is a function of the whole prefix up to it, as in a model, so content found at
the wrong place, of the wrong prefix, or of another layer is seen.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang.srt.swiftcache.elastic_allocator import ElasticAllocator
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from support.local_tier import LocalTier
from support.slow_streams import SlowStreams
from swiftcache_tier.blocks import NONE

LAYERS, HEADS, HEAD_DIM = 2, 1, 8
NO_BLOCKS = np.empty(0, dtype=np.int64)


@dataclass
class Running:
    """A request between its prefill and its end: its prefix is locked, its slots are its own."""

    tokens: list[int]
    slots: torch.Tensor
    cached: int
    last_node: TreeNode
    computed: Any = None
    """The event of its forward, where forwards take their time."""


FORWARDS = 2
"""That SGLang has launched and not seen the end of, when it launches another."""


def vacated(records: Sequence[logging.LogRecord], lost_blocks: int) -> list[Any]:
    """The records of steps that vacated, which must add up, also to what was lost in all."""
    steps: list[Any] = [record for record in records if getattr(record, "event", None) == "vacated"]
    assert steps
    for step in steps:
        parts = step.moved_blocks, step.lost_blocks, step.saved_blocks, step.left_blocks
        assert step.asked_blocks == sum(parts)
        assert min(parts) >= 0
    assert sum(step.lost_blocks + step.lost_beside_blocks for step in steps) == lost_blocks
    return steps


class Tree:
    """The cache, driven as SGLang's scheduler drives it."""

    def __init__(
        self,
        page_size: int,
        pages: int,
        policy: str,
        *,
        extent_bytes: int = 8192,
        verify: bool = False,
        replicas: int = 1,
        streams: SlowStreams | None = None,
        elastic: bool = False,
    ) -> None:
        """``elastic``: the pool is one that can be lent. ``streams``, in place by now: what loads,
        stores and forwards are done on; else all is done at once."""
        self.page_size = page_size
        self.streams = streams
        self._forwards: deque[Any] = deque()
        pool = (ElasticKVPool if elastic else MHATokenToKVPool)(
            size=pages * page_size,
            page_size=page_size,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.pool = pool
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * page_size, page_size, torch.float32, "cpu", pool, need_sort=False
        )
        if elastic:
            self.allocator = ElasticAllocator(self.allocator, pool)
        self.tokens_total = self.allocator.available_size()
        args = SimpleNamespace(
            swiftcache_donors=[],
            swiftcache_runtime_dir="/nowhere",
            swiftcache_io_backend="auto",
            swiftcache_verify=verify,
            swiftcache_replicas=replicas,
            swiftcache_ttl=None,
            swiftcache_donate="off",
            served_model_name="tiny",
            port=1,
            hicache_ratio=2.0,
            hicache_size=0,
            hicache_mem_layout="page_first",
            hicache_io_backend="kernel",
            hicache_write_policy=policy,
            hicache_storage_backend=None,
            hicache_storage_backend_extra_config=None,
            hicache_storage_prefetch_policy="timeout",
            extra_metric_labels=None,
        )
        from sglang.srt.swiftcache import donor_kv_cache, donor_radix_cache

        def tier(specs: Any, block_bytes: int, **_: Any) -> LocalTier:
            self.tier = LocalTier(block_bytes, extent_bytes)
            return self.tier

        def pool_class(_: Any) -> type:
            return donor_kv_cache.DonorKVCache

        with (
            mock.patch.object(donor_kv_cache, "get_server_args", return_value=args),
            mock.patch.object(donor_kv_cache, "DonorTier", tier),
            mock.patch("sglang.srt.mem_cache.hiradix_cache.get_mha_host_pool_cls", pool_class),
        ):
            self.cache = donor_radix_cache.DonorRadixCache(
                params=CacheInitParams(
                    disable=False,
                    req_to_token_pool=None,
                    token_to_kv_pool_allocator=self.allocator,
                    page_size=page_size,
                    tp_cache_group=torch.distributed.group.WORLD,
                ),
                server_args=args,
            )
        self.cache.load_back_threshold = 1
        if streams is not None:
            streams.slow_down(self.cache.tier_pool)
            self.cache._scheduler = SimpleNamespace(forward_stream=streams.forward)

    # -- a request ----------------------------------------------------------------------------

    def start(self, tokens: Sequence[int]) -> Running | None:
        """Match, restore, check what was restored, compute the rest. None if it does not fit."""
        cache = self.cache
        cache.check_hicache_events()
        key = self._key(tokens)
        match = cache.match_prefix(MatchPrefixParams(key=key))
        slots, node = match.device_indices, match.last_device_node
        with self._locked(node):
            if match.host_hit_length:
                request = SimpleNamespace(
                    host_hit_length=match.host_hit_length,
                    prefix_indices=slots,
                    full_untruncated_fill_ids=tokens,
                )
                loaded, node_after = cache.init_load_back(
                    InitLoadBackParams(
                        best_match_node=match.best_match_node,
                        host_hit_length=match.host_hit_length,
                        req=request,
                    )
                )
                assert request.host_hit_length == len(loaded)
                slots = torch.cat([slots, loaded])
        if match.host_hit_length:
            node = node_after
        cache.inc_lock_ref(node)
        self._await_forwards()
        consumer = cache.ready_to_load_host_cache()
        fresh = self._fresh(len(tokens) - len(slots))

        def forward() -> None:
            self.check_content(tokens[: len(slots)], slots)
            if fresh is not None:
                self.write_content(tokens, len(slots), fresh)

        computed = self._launch(forward, consumer)
        if fresh is None:
            self._await(computed)
            cache.dec_lock_ref(node)
            return None
        return Running(list(tokens), torch.cat([slots, fresh]), len(slots), node, computed)

    def _fresh(self, tokens: int) -> torch.Tensor | None:
        short = tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        fresh: torch.Tensor | None = self.allocator.alloc(tokens)
        return fresh

    def _await_forwards(self) -> None:
        while len(self._forwards) > FORWARDS:
            self._forwards.popleft().synchronize()

    def _launch(self, forward: Callable[[], None], consumer: int) -> Any:
        """``consumer``: of the loads that it waits for, -1 for none."""
        if self.streams is None:
            forward()
            return None
        events = self.cache.cache_controller.layer_done_counter.events
        loads = events[consumer].finish_event if consumer >= 0 else None
        self._forwards.append(self.streams.launch(forward, loads))
        return self._forwards[-1]

    def _await(self, computed: Any) -> None:
        """As the scheduler does before it looks at what a forward has computed."""
        if computed is not None:
            computed.synchronize()

    def finish(self, request: Running) -> None:
        """Insert what was computed, free what the tree has already, unlock."""
        self._await(request.computed)
        key = self._key(request.tokens)
        result = self.cache.insert(InsertParams(key=key, value=request.slots))
        self.allocator.free(request.slots[request.cached : result.prefix_len])
        self.cache.dec_lock_ref(request.last_node)

    def finish_beside_a_forward(self, request: Running, tokens: Sequence[int]) -> bool:
        """Decode some more tokens and end, while the KV of the last one is still computed.

        As under SGLang's overlap: when it sees that a request has ended, the next forward has been
        launched with it. Fewer than a page of ``tokens`` leave a page that is freed meanwhile, a
        whole page goes into the tree. False, and the request goes on, if there is no page for them.
        """
        assert 0 < len(tokens) <= self.page_size
        self._await(request.computed)
        page = self._fresh(self.page_size)
        if page is None:
            return False
        everything = [*request.tokens, *tokens]
        last = len(everything) - 1
        self.write_content(everything[:last], len(request.tokens), page[: len(tokens) - 1])
        self._launch(lambda: self.write_content(everything, last, page[len(tokens) - 1 :][:1]), -1)
        slots = torch.cat([request.slots, page])
        whole = len(everything) // self.page_size * self.page_size
        result = self.cache.insert(
            InsertParams(key=self._key(everything[:whole]), value=slots[:whole])
        )
        self.allocator.free_segment(slots[request.cached : result.prefix_len], start_pos=0)
        self.allocator.free_segment(slots[whole:], start_pos=0)
        self.cache.dec_lock_ref(request.last_node)
        self.cache._loads.request_ended()
        return True

    def abort(self, request: Running) -> None:
        self._await(request.computed)
        self.allocator.free(request.slots[request.cached :])
        self.cache.dec_lock_ref(request.last_node)

    def run(self, tokens: Sequence[int]) -> int | None:
        """A whole request. Returns the tokens that were restored or on the device."""
        request = self.start(tokens)
        if request is None:
            return None
        self.finish(request)
        return request.cached

    # -- content ------------------------------------------------------------------------------

    def write_content(self, tokens: Sequence[int], start: int, slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            self.pool.k_buffer[layer][self._at(slots)] = self._expected(tokens, start, layer, 0)
            self.pool.v_buffer[layer][self._at(slots)] = self._expected(tokens, start, layer, 1)

    def check_content(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        for layer in range(LAYERS):
            for side, buffer in ((0, self.pool.k_buffer), (1, self.pool.v_buffer)):
                expected = self._expected(tokens, 0, layer, side)
                assert torch.equal(buffer[layer][self._at(slots)], expected), (
                    f"layer {layer} {'kv'[side]}: wrong KV for a prefix of {len(tokens)} tokens"
                )

    def _at(self, slots: torch.Tensor) -> Any:
        """How the pool's views are indexed."""
        if isinstance(self.pool, ElasticKVPool):
            return slots // self.page_size, slots % self.page_size
        return slots

    def _expected(self, tokens: Sequence[int], start: int, layer: int, side: int) -> torch.Tensor:
        rows = []
        digest = hashlib.blake2b(digest_size=8)
        for position, token in enumerate(tokens):
            digest.update(token.to_bytes(4, "little"))
            if position >= start:
                seed = int.from_bytes(digest.digest(), "little") % (1 << 20)
                rows.append(seed * 4 + layer * 2 + side)
        values = torch.tensor(rows, dtype=torch.float64).view(-1, 1, 1)
        # exact in float32: below 2**24
        return (values + torch.zeros(HEADS, HEAD_DIM)).to(torch.float32)

    # -- accounting ---------------------------------------------------------------------------

    def nodes(self) -> list[TreeNode]:
        found, stack = [], list(self.cache.root_node.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def check(self, running: Sequence[Running] = ()) -> None:
        """No device slot and no donor block is lost, or has two owners."""
        self.tier.pool.check()
        nodes = self.nodes()
        copies = [n.host_value for n in nodes if n.host_value is not None]
        blocks = np.concatenate([self.cache.tier_pool.blocks_of(c) for c in copies] or [NO_BLOCKS])
        assert len(set(blocks.tolist())) == len(blocks), "a donor block has two owners"
        counts = self.tier.pool.counts()
        copies_of = self._check_copies(blocks)
        assert counts.used + counts.retiring == len(blocks) + copies_of, "donor blocks are lost"
        for node in nodes:
            assert node.value is not None or node.host_value is not None, "a node with nothing"
            if node.value is None:
                assert node.lock_ref == 0
        own = sum(len(r.slots) - r.cached for r in running)
        cached = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + cached + own == self.tokens_total
        on_device = sum(len(n.value) for n in nodes if n.value is not None)
        assert on_device == cached

    def _check_copies(self, blocks: np.ndarray) -> int:
        """No two copies of a block lie on one donor. Returns how many copies there are."""
        replicas = self.cache.tier_pool.replicas
        if replicas is None:
            return 0
        all_copies: list[int] = []
        for block, copies in zip(blocks.tolist(), replicas.of(blocks).tolist(), strict=True):
            placed = [block, *(copy for copy in copies if copy != NONE)]
            donors = self.tier.donor_of(np.array(placed)).tolist()
            assert len(set(donors)) == len(donors), "two copies of a block on one donor"
            all_copies += placed[1:]
        assert len(set(all_copies)) == len(all_copies) == replicas.copies
        assert not set(all_copies) & set(blocks.tolist()), "a block is its own copy"
        return len(all_copies)

    def _key(self, tokens: Sequence[int]) -> RadixKey:
        return RadixKey(token_ids=array("q", tokens), extra_key=None)

    def _locked(self, node: TreeNode) -> Any:
        import contextlib

        @contextlib.contextmanager
        def lock() -> Any:
            self.cache.inc_lock_ref(node)
            try:
                yield
            finally:
                self.cache.dec_lock_ref(node)

        return lock()
