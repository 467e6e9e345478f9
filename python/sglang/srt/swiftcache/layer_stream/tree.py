"""``StreamRadixCache``: the radix tree over regular slots, window slots and donors.

The value of a node is all regular or all window slots; nodes are split where the kind changes. A
node on window slots needs no copy to have one: its content lives in the home blocks of its pages,
and these are its ``host_value``. So matching, locking, splitting and loading back are HiCache's:

- evicting such a node moves no byte: the node keeps the blocks, the pages get fresh homes. If the
  tier has none left, the node is dropped and the pages keep theirs;
- loading a node back takes regular slots where there are any, and a copy. Otherwise window pages
  take the node's blocks for their homes, which moves no byte either: the node is streamed.

Requests that share a prefix share its slots, so what they share is gathered once however many read
it.
"""

from __future__ import annotations

import heapq
import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.swiftcache.donor_radix_cache import DonorRadixCache
from sglang.srt.swiftcache.layer_stream.admission import Admission
from sglang.srt.swiftcache.layer_stream.allocator import StreamAllocator
from sglang.srt.swiftcache.layer_stream.homes import HomeKeeper, StreamVacater
from sglang.srt.swiftcache.layer_stream.loading import WindowLoader
from sglang.srt.swiftcache.layer_stream.planning import plan_forward
from sglang.srt.swiftcache.layer_stream.rows import known_pages, pages_of, with_pages
from sglang.srt.swiftcache.layer_stream.shortage import Shortage
from sglang.srt.swiftcache.layer_stream.streamer import NO_IDS, ForwardPlan, LayerStreamer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class StreamRadixCache(DonorRadixCache):
    """Prefix KV on the device, in the window and on donors. Scheduler thread only."""

    token_to_kv_pool_allocator: StreamAllocator
    chooses_copies = False  # a node on window slots has its content on donors in any case

    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        self._homes: HomeKeeper | None = None
        self.promoted_tokens = 0
        self._loader = WindowLoader(self)
        self._row: int | None = None  # of the request whose tokens are being inserted
        self._new_nodes: list[tuple[TreeNode, bool]] | None = None
        super().__init__(params=params, server_args=server_args)
        self.allocator.make_regular_room = self.make_regular_room
        share = self.tier_pool.settings.resident_share
        self.allocator.kept_pages = math.ceil(self.allocator.book.regular_pages * share)
        self._vacater: StreamVacater = StreamVacater(self)
        self.admission = Admission(self)
        self.shortage = Shortage(self)

    @property
    def allocator(self) -> StreamAllocator:
        return self.token_to_kv_pool_allocator

    @property
    def homes(self) -> HomeKeeper:
        assert self._homes is not None
        return self._homes

    @property
    def streamer(self) -> LayerStreamer:
        streamer = self.allocator.get_kvcache().streamer
        assert streamer is not None
        return streamer

    def reset(self) -> None:
        super().reset()
        # the parents' constructor calls this, when the tier has just joined its donors
        self.tier_pool.in_flight = self.streamer.in_flight
        if self._homes is None:
            self._homes = HomeKeeper(self.allocator.book, self.tier_pool)
        self._homes.take_all()

    def check_hicache_events(self) -> None:
        self.tier_pool.release_held()
        super().check_hicache_events()
        self.homes.settle(self._vacater.evict_copies)

    # -- requests -------------------------------------------------------------------------------

    def waits_for_donors(self, req: Req) -> bool:
        return self.shortage.is_beyond(req)

    def cache_finished_req(self, req: Req, *args: Any, **kwargs: Any) -> None:
        self._row = req.req_pool_idx
        try:
            super().cache_finished_req(req, *args, **kwargs)
        finally:
            self._row = None

    def cache_unfinished_req(self, req: Req, *args: Any, **kwargs: Any) -> None:
        self._row = req.req_pool_idx
        try:
            super().cache_unfinished_req(req, *args, **kwargs)
        finally:
            self._row = None
        # where the tree had the same tokens already, the request goes on with the tree's slots
        self.allocator.rows.set(req.req_pool_idx, 0, self.pages_to(req.last_node))

    def note_extend(self, batch: ScheduleBatch) -> None:
        """The slots of a prefill batch have been allocated."""
        rows = [req.req_pool_idx for req in batch.reqs]
        for req, row in zip(batch.reqs, rows, strict=True):
            self.allocator.rows.set(row, 0, self.pages_to(req.last_node))
        self.allocator.note_extend(rows, batch.prefix_lens, batch.seq_lens_cpu.tolist())

    def note_decode(self, batch: ScheduleBatch) -> None:
        """The slots of a decode batch have been allocated; its lengths are still those before."""
        lens = (batch.seq_lens_cpu + 1).tolist()
        self.allocator.note_decode([req.req_pool_idx for req in batch.reqs], lens)

    def plan(self, batch: ScheduleBatch) -> ForwardPlan | None:
        """What the forward of a batch streams; None if no window page is concerned."""
        return plan_forward(batch, self.allocator.book, self.allocator.rows, self.tier_pool)

    def stranded(self, requests: list[Req]) -> int | None:
        """The place of a request that cannot go on where it is; see `StreamVacater`."""
        return self._vacater.stranded(requests)

    def retire_lost_pages(self) -> None:
        """Of a request that was retracted: others are not to lose their place for them, too."""
        self._vacater.vacate_free_pages()

    # -- nodes ----------------------------------------------------------------------------------

    def is_window(self, node: TreeNode) -> bool:
        """Whether a node is on window slots; False for one that is not on the device."""
        pages = pages_of(node.value)
        return pages is not None and bool(self.allocator.book.is_window(pages[:1]).any())

    def pages_to(self, node: TreeNode) -> np.ndarray:
        """The pages of all tokens up to the end of a node that is on the device, int64."""
        pages: list[np.ndarray] = []
        while node is not self.root_node:
            pages.insert(0, known_pages(node.value))
            node = node.parent
        return np.concatenate(pages) if pages else NO_IDS

    def insert(self, params: InsertParams) -> InsertResult:
        key = params.key.page_aligned(self.page_size)
        if self._row is not None:
            pages = self.allocator.rows.get(self._row, len(key))
        else:
            pages = known_pages(params.value)
        self._new_nodes = []
        try:
            result = super().insert(params)
            new_nodes = self._new_nodes
        finally:
            self._new_nodes = None
        parts = self._note_pages(key, pages)
        for node, chunked in new_nodes:
            for part in parts[node]:
                super()._inc_hit_count(part, chunked)
        return result

    def _inc_hit_count(self, node: TreeNode, chunked: bool = False) -> None:
        # It may write a node through, which must wait until the node is of one kind.
        if self._new_nodes is not None and pages_of(node.value) is None:
            self._new_nodes.append((node, chunked))
        else:
            super()._inc_hit_count(node, chunked)

    def _note_pages(self, key: RadixKey, pages: np.ndarray) -> dict[TreeNode, list[TreeNode]]:
        """Note the pages of the nodes of ``key`` that have just got their slots.

        Splits them where the kind of page changes. Returns each with its parts, parents first.
        """
        parts: dict[TreeNode, list[TreeNode]] = {}
        node, at = self.root_node, 0
        while at < len(key):
            first_page = key[at : at + self.page_size]
            node = node.children[first_page.child_key(self.page_size)]
            end = at + len(node.key)
            if not node.evicted and pages_of(node.value) is None:
                mine = pages[at // self.page_size : end // self.page_size]
                with_pages(node.value, mine)
                parts[node] = self._split_by_kind(node, mine)
            at = end
        return parts

    def _split_by_kind(self, node: TreeNode, pages: np.ndarray) -> list[TreeNode]:
        kinds = self.allocator.book.is_window(pages)
        parts: list[TreeNode] = []
        begin = 0
        for border in (np.flatnonzero(np.diff(kinds)) + 1).tolist():
            parts.append(self._split_node(node.key, node, (border - begin) * self.page_size))
            begin = border
        parts.append(node)
        for part in parts:
            if self.is_window(part):
                self._live_in_homes(part)
        return parts

    def _live_in_homes(self, node: TreeNode) -> None:
        """A node has got window slots: its copy is what their home blocks hold."""
        homes = self.allocator.book.homes_of(known_pages(node.value))
        if node.host_value is not None:  # it was on donors only, and was computed again
            self.cache_controller.evict_host(node.host_value)
        node.host_value = self.tier_pool.slots_of(homes)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        pages = pages_of(child.value)
        parent: TreeNode = super()._split_node(key, child, split_len)
        if pages is not None:
            border = split_len // self.page_size
            with_pages(parent.value, pages[:border])
            with_pages(child.value, pages[border:])
        return parent

    # -- eviction -------------------------------------------------------------------------------

    def make_regular_room(self, pages: int) -> None:
        """Evict, least recently used first, until so many regular pages more are free.

        Window nodes go only where they stand on regular ones. May free fewer.
        """
        book = self.allocator.book
        wanted = book.free_regular + pages
        heap = self._make_eviction_heap()
        while heap and book.free_regular < wanted:
            _, node = heapq.heappop(heap)
            if node.lock_ref > 0 or (self.is_window(node) and not self._on_regular(node)):
                continue
            if node.backuped:
                self._evict_backuped(node)
            else:
                self._evict_regular(node)
            self._promote_parent(node, heap)

    def _on_regular(self, node: TreeNode) -> bool:
        """Whether an ancestor that nobody has locked is on regular slots."""
        node = node.parent
        while node is not self.root_node and node.lock_ref == 0:
            if not self.is_window(node):
                return True
            node = node.parent
        return False

    def _evict_backuped(self, node: TreeNode) -> int:
        if self.is_window(node) and not self.renew_homes(known_pages(node.value)):
            return self.drop_window_node(node)
        freed: int = super()._evict_backuped(node)
        return freed

    def renew_homes(self, pages: np.ndarray) -> bool:
        """`HomeKeeper.renew`, after what is colder has made room for it."""
        self._vacater.evict_copies(len(pages))
        return self.homes.renew(pages)

    def drop_window_node(self, node: TreeNode) -> int:
        """Forget an unlocked device leaf on window slots; the pages keep their homes.

        Returns the tokens freed: 0 if something below it is in use.
        """
        copy, node.host_value = node.host_value, None
        freed = self._evict_regular(node)
        if freed == 0:
            node.host_value = copy
        return freed

    # -- loading back ---------------------------------------------------------------------------

    def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None:
        return self._loader.load_back(node, mem_quota, super().load_back)

    def promote(self, req: Req) -> None:
        """See `WindowLoader.promote`."""
        self.promoted_tokens += self._loader.promote(req)

    def ready_to_load_host_cache(self) -> int:
        # blocks of window pages may still be written by the forward in flight
        self.streamer.order_after_forward(self.cache_controller.load_stream)
        consumer: int = super().ready_to_load_host_cache()
        return consumer

    # -- accounting -----------------------------------------------------------------------------

    def protected_size(self) -> int:
        """Retired pages count as held: they come back with donor memory."""
        held: int = super().protected_size()
        return held + self.allocator.book.retired * self.page_size

    def blocks_of_no_node(self) -> np.ndarray:
        """Homes of window pages; those of nodes on window slots are the nodes' blocks too."""
        return self.allocator.book.homes()

    def status(self) -> dict[str, Any]:
        book = self.allocator.book
        return {
            **super().status(),
            "layer_stream": {
                "window_slots": {
                    "used": book.used_window * self.page_size,
                    "free": book.free_window * self.page_size,
                    "retired": book.retired * self.page_size,
                    "total": book.window_pages * self.page_size,
                },
                "regular_slots": {
                    "free": book.free_regular * self.page_size,
                    "total": book.regular_pages * self.page_size,
                },
                "bytes": {
                    "gathered": self.streamer.gathered_bytes,
                    "scattered": self.streamer.scattered_bytes,
                },
                "host_reads": self.allocator.host_reads,
                "promoted_tokens": self.promoted_tokens,
                "retracted": self.homes.retracted,
            },
        }
