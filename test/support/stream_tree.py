"""A radix tree over a pool with a layer window, driven through forwards that check every byte.

As `kv_tree`, the KV of a token is a function of the whole prefix up to it and of the layer. Here a
request's tokens are computed by a forward that visits the layers one after the other, writes the
new tokens and reads all of them, as attention does. Between forwards the window is poisoned.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from support.local_tier import LocalTier
from support.slow_streams import SlowStreams

LAYERS, HEADS, HEAD_DIM, PAGE = 5, 1, 64, 4
MAX_ROWS, MAX_TOKENS = 8, 512
UNIT = 4096 // (HEADS * HEAD_DIM * 4)
"""Tokens in a page of memory, in one side of one layer."""


@dataclass(eq=False)
class Request:
    """What the tree and the planning read of SGLang's Req."""

    req_pool_idx: int
    origin_input_ids: array[int]
    prefix_indices: torch.Tensor
    last_node: TreeNode
    cache_protected_len: int
    computed: int = 0
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    extra_key: str | None = None
    priority: int = 0
    swiftcache_streams: bool = False
    max_new_tokens: int = 0

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(max_new_tokens=self.max_new_tokens)

    @property
    def tokens(self) -> array[int]:
        return self.origin_input_ids + self.output_ids

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return self.tokens

    def get_fill_ids(self) -> array[int]:
        return self.tokens[: self.computed]

    def finished(self) -> bool:
        return False

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(kv_allocated_len=self.computed)


class StreamTree:
    """The cache with a window, driven as SGLang's scheduler drives it."""

    def __init__(
        self,
        regular_units: int,
        window_units: int,
        policy: str = "write_through",
        *,
        donor_extents: int = 64,
        extent_bytes: int = 8192,
        budget_bytes: int = 1 << 30,
        streams: SlowStreams | None = None,
    ) -> None:
        """``streams``, in place by now: what loads and stores are done on; else both at once."""
        from sglang.srt.swiftcache import donor_kv_cache
        from sglang.srt.swiftcache.layer_stream.allocator import StreamAllocator
        from sglang.srt.swiftcache.layer_stream.movers import HostMover
        from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool
        from sglang.srt.swiftcache.layer_stream.streamer import LayerStreamer
        from sglang.srt.swiftcache.layer_stream.tree import StreamRadixCache
        from swiftcache_kernel import PoolBuffers

        window, regular = window_units * UNIT, regular_units * UNIT - PAGE
        self.pool = StreamKVPool(
            regular + window,
            page_size=PAGE,
            window_tokens=window,
            dtype=torch.float32,
            head_num=HEADS,
            head_dim=HEAD_DIM,
            layer_num=LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        layout = donor_kv_cache.block_layout(self.pool)
        buffers = PoolBuffers(layout, self.pool.k_buffer, self.pool.v_buffer)
        self.streamer = self.pool.streamer = LayerStreamer(HostMover(buffers), LAYERS)
        self.table = torch.zeros((MAX_ROWS, MAX_TOKENS), dtype=torch.int32)
        self.allocator = StreamAllocator(
            self.pool.size, PAGE, torch.float32, "cpu", self.pool, False, self.table
        )
        self.free_rows = list(range(MAX_ROWS))
        self.running: list[Request] = []
        self.chunked: Request | None = None
        """The one of them whose prefill has not ended."""
        args = SimpleNamespace(
            swiftcache_donors=[],
            swiftcache_runtime_dir="/nowhere",
            swiftcache_io_backend="auto",
            swiftcache_verify=False,
            swiftcache_replicas=1,
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

        def tier(specs: Any, block_bytes: int, **_: Any) -> LocalTier:
            self.tier = LocalTier(block_bytes, extent_bytes)
            self.tier.join(1, donor_extents)
            return self.tier

        with (
            mock.patch.object(donor_kv_cache, "get_server_args", return_value=args),
            mock.patch.object(donor_kv_cache, "DonorTier", tier),
            mock.patch.dict("os.environ", {"SWIFTCACHE_STREAM_BYTES_PER_STEP": str(budget_bytes)}),
            mock.patch(
                "sglang.srt.mem_cache.hiradix_cache.get_mha_host_pool_cls",
                return_value=donor_kv_cache.DonorKVCache,
            ),
        ):
            self.cache = StreamRadixCache(
                params=CacheInitParams(
                    disable=False,
                    req_to_token_pool=SimpleNamespace(
                        req_to_token=self.table, write=self._write_row
                    ),
                    token_to_kv_pool_allocator=self.allocator,
                    page_size=PAGE,
                    tp_cache_group=torch.distributed.group.WORLD,
                ),
                server_args=args,
            )
        self.cache.load_back_threshold = 1
        self.streams = streams
        if streams is not None:
            streams.slow_down(self.cache.tier_pool)
        self.tokens_total = self.pool.size
        self.poison()

    # -- a request ------------------------------------------------------------------------------

    def start(
        self,
        tokens: Sequence[int],
        chunk: int | None = None,
        *,
        beside: Sequence[Request] = (),
        streams: bool = False,
        output: int = 0,
    ) -> Request | None:
        """Match, load back, prefill (in chunks of so many tokens). None if it does not fit.

        beside: requests that decode one token in the same forward as the last chunk. streams: it
        was admitted as one that does not fit in regular slots. output: tokens that it may decode.
        """
        request = self._admit(tokens, PAGE * len(beside), streams, output)
        if request is not None:
            while len(request.tokens) - request.computed > (chunk or len(tokens)):
                self._extend_by(request, chunk or len(tokens))
            self._extend_by(request, len(tokens), beside)
        return request

    def start_in_chunks(self, tokens: Sequence[int]) -> Request | None:
        """Its prefill is done by `next_chunk`. None if it does not fit, or if there is one."""
        if self.chunked is None:
            self.chunked = self._admit(tokens)
            return self.chunked
        return None

    def next_chunk(self, tokens: int, beside: Sequence[Request] = ()) -> bool:
        """A step of the scheduler that goes on with `chunked`. False if it was stopped instead.

        beside: requests that decode one token in the same forward.
        """
        self.cache.check_hicache_events()
        request = self.chunked
        assert request is not None
        decodes = PAGE * sum(other.computed % PAGE == 0 for other in beside)
        running = SimpleNamespace(reqs=beside)
        if beside:  # SGLang's empty batch cannot say
            running.new_tokens_required_next_decode = lambda: decodes
        adder = SimpleNamespace(rem_chunk_tokens=tokens, running_batch=running)
        if not self.cache.shortage.may_go_on(adder, request):
            self.finish(request, insert=False)
            self.cache.retire_lost_pages()
            return False
        with self.allocator.slots_for([request]):
            self._room(tokens + PAGE + decodes)
        self._extend_by(request, tokens, beside)
        if request.computed == len(request.tokens):
            self.chunked = None
        return True

    @property
    def decoding(self) -> list[Request]:
        return [request for request in self.running if request is not self.chunked]

    def _admit(
        self, tokens: Sequence[int], more: int = 0, streams: bool = False, output: int = 0
    ) -> Request | None:
        """A request with a row, and room for its tokens and so many ``more``."""
        cache = self.cache
        cache.check_hicache_events()
        ids = array("q", tokens)
        # the last token is always computed
        match = cache.match_prefix(
            MatchPrefixParams(key=RadixKey(token_ids=ids[: len(ids) - 1], extra_key=None))
        )
        request = Request(
            -1, ids, match.device_indices, match.last_device_node, len(match.device_indices)
        )
        request.swiftcache_streams, request.max_new_tokens = streams, output
        with self.allocator.slots_for([request]):
            admitted = self._find_room(request, match, more)
        self._begin_loads()
        if not admitted:
            return None
        request.req_pool_idx = self.free_rows.pop()
        request.computed = len(request.prefix_indices)
        self.running.append(request)
        return request

    def _find_room(self, request: Request, match: Any, more: int) -> bool:
        """Load back and lock the prefix of a request, if there is room for the rest."""
        cache, ids = self.cache, request.origin_input_ids
        if match.host_hit_length:
            cache.inc_lock_ref(request.last_node)
            loaded, last_node = cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=match.best_match_node,
                    host_hit_length=match.host_hit_length,
                    req=SimpleNamespace(
                        host_hit_length=match.host_hit_length,
                        prefix_indices=request.prefix_indices,
                        full_untruncated_fill_ids=ids,
                    ),
                )
            )
            cache.dec_lock_ref(match.last_device_node)
            request.last_node = last_node
            request.prefix_indices = torch.cat([request.prefix_indices, loaded])
            request.cache_protected_len = len(request.prefix_indices)
        cache.inc_lock_ref(request.last_node)
        needed = len(ids) - len(request.prefix_indices) + PAGE + more
        if not self.free_rows or not self._room(needed):
            cache.dec_lock_ref(request.last_node)
            return False
        cache.promote(request)
        return True

    def _extend_by(self, request: Request, tokens: int, beside: Sequence[Request] = ()) -> None:
        end = min(len(request.tokens), request.computed + tokens)
        self._extend(request, end, beside)
        self.cache.cache_unfinished_req(request, chunked=end < len(request.tokens))

    def decode(self, requests: Sequence[Request], token: int) -> bool:
        """One more token each, in one batch. False if it does not fit."""
        if not requests or not self._room(len(requests) * PAGE):
            return False
        self._one_more(requests, token)
        lens = torch.tensor([request.computed for request in requests])
        self.forward(self._batch(requests, lens, [1] * len(requests), decode=True))
        return True

    def _one_more(self, requests: Sequence[Request], token: int) -> None:
        """Slots for one more token each."""
        lens = torch.tensor([r.computed for r in requests])
        last = torch.stack([self.table[r.req_pool_idx, r.computed - 1] for r in requests])
        with self.allocator.slots_for(requests):
            slots = self.allocator.alloc_decode(lens + 1, lens + 1, last.to(torch.int64))
        assert slots is not None
        self.cache.note_decode(self._batch(requests, lens, [1] * len(requests), decode=True))
        for request, slot in zip(requests, slots, strict=True):
            self.table[request.req_pool_idx, request.computed] = slot.to(torch.int32)
            request.output_ids.append(token)
            request.computed += 1

    def finish(self, request: Request, *, insert: bool = True) -> None:
        self.running.remove(request)
        if request is self.chunked:
            self.chunked = None
        self.cache.cache_finished_req(request, is_insert=insert, kv_len_to_handle=request.computed)
        self.free_rows.append(request.req_pool_idx)

    def run(self, tokens: Sequence[int], chunk: int | None = None) -> int | None:
        """A whole request with one token of output. Returns the tokens that were not computed."""
        request = self.start(tokens, chunk)
        if request is None:
            return None
        cached = request.cached  # type: ignore[attr-defined]
        self.decode([request], 7)
        self.finish(request)
        return int(cached)

    def retract_stranded(self) -> None:
        place = self.cache.stranded(self.decoding)
        if place is not None:
            self.finish(self.decoding[place], insert=False)
            self.cache.retire_lost_pages()

    def _extend(self, request: Request, end: int, beside: Sequence[Request]) -> None:
        start = request.computed
        if start == len(request.prefix_indices) and not hasattr(request, "cached"):
            request.cached = start  # type: ignore[attr-defined]
        prefix = request.prefix_indices
        last = prefix[-1:].to(torch.int64) if len(prefix) else torch.tensor([-1])
        starts, ends = torch.tensor([start]), torch.tensor([end])
        with self.allocator.slots_for([request]):
            slots = self.allocator.alloc_extend(starts, starts, ends, ends, last, end - start)
        assert slots is not None, "room was made for it"
        self.table[request.req_pool_idx, :start] = prefix.to(torch.int32)
        self.table[request.req_pool_idx, start:end] = slots.to(torch.int32)
        request.computed = end
        new = end - start
        self.cache.note_extend(self._batch([request], ends, [new], decode=False))
        if beside:
            self._one_more(beside, 9)
        lens = torch.tensor([end, *(other.computed for other in beside)])
        new_lens = [new, *(1 for _ in beside)]
        self.forward(self._batch([request, *beside], lens, new_lens, decode=False))

    def _begin_loads(self) -> None:
        self._await_loads()  # SGLang counts on the forwards before to have done so
        self.cache.ready_to_load_host_cache()

    def _await_loads(self) -> None:
        if self.streams is not None:
            self.cache.cache_controller.load_stream.synchronize()

    def _room(self, tokens: int) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        short = tokens - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        return self.allocator.available_size() >= tokens

    def _write_row(self, where: tuple[int, slice], slots: torch.Tensor) -> None:
        self.table[where] = slots.to(torch.int32)

    def _batch(
        self,
        requests: Sequence[Request],
        lens: torch.Tensor,
        new_lens: list[int],
        *,
        decode: bool,
    ) -> Any:
        starts = [n - new for n, new in zip(lens.tolist(), new_lens, strict=True)]
        return SimpleNamespace(
            reqs=list(requests),
            seq_lens_cpu=lens,
            prefix_lens=starts,
            extend_lens=new_lens,
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
        )

    # -- a forward ------------------------------------------------------------------------------

    def forward(self, batch: Any) -> None:
        """Write the new tokens of every request and read all of them, layer by layer."""
        self._await_loads()
        with self.streamer.planned(self.cache.plan(batch)), self.streamer.forward():
            self.streamer.wrap_model(self._layers)(batch)
        self.poison()

    def _layers(self, batch: Any) -> None:
        lens, starts = batch.seq_lens_cpu.tolist(), batch.prefix_lens
        for layer in range(LAYERS):
            for side, get in enumerate((self.pool.get_key_buffer, self.pool.get_value_buffer)):
                buffer = get(layer)
                for request, start, end in zip(batch.reqs, starts, lens, strict=True):
                    slots = self.table[request.req_pool_idx, :end].to(torch.int64)
                    right = expected(request.tokens[:end], layer, side)
                    buffer[slots[start:]] = right[start:]
                    assert torch.equal(buffer[slots], right), (
                        f"layer {layer} {'kv'[side]}: wrong KV for {end} tokens"
                    )

    def poison(self) -> None:
        for layer in range(min(2, LAYERS)):
            self.pool.k_buffer[layer][self.pool.first_window_slot :] = float("nan")
            self.pool.v_buffer[layer][self.pool.first_window_slot :] = float("nan")

    # -- accounting -----------------------------------------------------------------------------

    def nodes(self) -> list[TreeNode]:
        found, stack = [], list(self.cache.root_node.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def check(self) -> None:
        """No page and no block is lost or has two owners; what is cached has the right content."""
        self.tier.pool.check()
        cache, book = self.cache, self.allocator.book
        nodes = self.nodes()
        on_device = [n for n in nodes if n.value is not None]
        owners = [cache.pages_to(n)[-(len(n.key) // PAGE) :] for n in on_device]
        for request in self.running:
            held = self.allocator.rows.get(request.req_pool_idx, request.computed)
            owners.append(held[request.cache_protected_len // PAGE :])
            rows = self.table[request.req_pool_idx, : request.computed : PAGE] // PAGE
            assert rows.tolist() == held.tolist(), "the host's pages are not the device's"
        book.check(owners)
        for node, pages in zip(on_device, owners, strict=False):
            assert (node.value.view(-1, PAGE)[:, 0] // PAGE).tolist() == pages.tolist()
            assert len(set(book.is_window(pages).tolist())) == 1, "a node of both kinds"
            if cache.is_window(node):
                homes = book.homes_of(pages)
                assert homes.tolist() == cache.tier_pool.blocks_of(node.host_value).tolist()
        copies = [
            cache.tier_pool.blocks_of(n.host_value)
            for n in nodes
            if n.host_value is not None and not cache.is_window(n)
        ]
        blocks = np.concatenate([*copies, book.homes()])
        assert np.unique(blocks).size == blocks.size, "a donor block has two owners"
        counts = self.tier.pool.counts()
        assert counts.used + counts.retiring == blocks.size, "donor blocks are lost"
        own = sum(-(-r.computed // PAGE) * PAGE - r.cache_protected_len for r in self.running)
        cached = cache.evictable_size() + cache.protected_size()
        assert self.allocator.available_size() + cached + own == self.tokens_total
        assert self.allocator.host_reads == 0, "pages were read back from the device"


@functools.lru_cache(maxsize=4096)
def _expected(tokens: bytes, layer: int, side: int) -> torch.Tensor:
    digest = hashlib.blake2b(digest_size=8)
    rows = []
    for at in range(0, len(tokens), 8):
        digest.update(tokens[at : at + 8])
        seed = int.from_bytes(digest.digest(), "little") % (1 << 18)
        rows.append(seed * 2 * LAYERS + layer * 2 + side)
    values = torch.tensor(rows, dtype=torch.float64).view(-1, 1, 1)
    # exact in float32: below 2**24
    return (values + torch.zeros(HEADS, HEAD_DIM)).to(torch.float32)


def expected(tokens: array[int], layer: int, side: int) -> torch.Tensor:
    return _expected(tokens.tobytes(), layer, side)
