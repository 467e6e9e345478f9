"""``DonorRadixCache``: SGLang's two-tier radix tree, with donors as the second tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

from sglang.srt.swiftcache.audit import Audit
from sglang.srt.swiftcache.cold_copies import ColdCopies
from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache
from sglang.srt.swiftcache.expiry import Expiry
from sglang.srt.swiftcache.loads import Loads
from sglang.srt.swiftcache.refill import Refiller
from sglang.srt.swiftcache.stores import Stores
from sglang.srt.swiftcache.tier_metrics import TierMetrics
from sglang.srt.swiftcache.tier_stats import TierStats
from sglang.srt.swiftcache.vacate import Vacater
from sglang.srt.swiftcache.verify import LoadVerifier
from sglang.srt.swiftcache.watchdog import Watchdog

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        EvictResult,
        InitLoadBackParams,
    )
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.server_args import ServerArgs


class DonorRadixCache(HiRadixCache):
    """Prefix KV on the device and on donors. Scheduler thread only.

    HiCache's seam is kept: ``node.value`` is device slots, ``node.host_value`` donor slots; write
    policies, load-back and eviction (LRU in both tiers) are the parent's. Added here: donors join
    and leave while the server runs, and what lies in their memory follows (``vacate``); and where
    they lend little, what has a copy there is chosen (``cold_copies``).
    """

    token_to_kv_pool_host: DonorKVCache
    chooses_copies = True
    stores: Stores

    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        self.stats = TierStats()
        self._cold_copies: ColdCopies | None = None
        self._scheduler: Scheduler | None = None
        super().__init__(params=params, server_args=server_args)
        self.stores = Stores(self.cache_controller, self.tier_pool, self.record_behind_forwards)
        self._loads = Loads(self.cache_controller, self.record_behind_forwards)
        self.cache_controller.evict_device = self._free_on_device
        self._vacater = Vacater(self)
        if self.chooses_copies and self.cache_controller.write_policy != "write_back":
            self._cold_copies = ColdCopies(self, self._vacater)
        checksums = self.tier_pool.checksums
        self._verifier = None if checksums is None else LoadVerifier(self, self._vacater, checksums)
        replicas = self.tier_pool.replicas
        self._refiller = (
            None if replicas is None else Refiller(self.tier_pool, self._vacater, replicas)
        )
        ttl_s = server_args.swiftcache_ttl
        self._expiry = None if ttl_s is None else Expiry(self, self._vacater, ttl_s)
        self._watchdog: Watchdog | None = None
        self._audit: Audit | None = None
        self._metrics = None
        if params.enable_metrics:
            labels = server_args.extra_metric_labels or {}
            self._metrics = TierMetrics(self, labels, self.tier_pool.settings.metrics_interval_s)
            self._metrics.step()

    @property
    def tier_pool(self) -> DonorKVCache:
        return self.token_to_kv_pool_host

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "stores"):  # the parent's constructor resets, too
            self.stores.clear()
        # The parent forgets the events of transfers and keeps their nodes, now of no tree.
        self.ongoing_write_through.clear()
        self.ongoing_load_back.clear()

    def check_hicache_events(self) -> None:
        """Called by the scheduler at every step, also when idle or only decoding."""
        self.stores.step()
        super().check_hicache_events()
        self.tier_pool.tier.poll()
        self._vacater.step()
        if self._cold_copies is not None:
            self._cold_copies.step()
        if self._refiller is not None:
            self._refiller.step()
        if self._expiry is not None:
            self._expiry.step()
        if self._watchdog is not None:
            self._watchdog.step()
        if self._audit is not None:
            self._audit.step()
        if self._metrics is not None:
            self._metrics.step()

    def writing_check(self, write_back: bool = False, finish_count: int | None = None) -> None:
        if write_back:  # waits for them, in the middle of a step
            self.stores.begin_all()
        super().writing_check(write_back, finish_count)

    def _free_on_device(self, slots: torch.Tensor) -> int:
        """In place of the controller's ``evict_device``, which looks for the distinct pages.

        Their number is known to the GPU alone, so that one waits for the forward that is running.
        Slots of a node are whole pages, in order.
        """
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        return len(slots)

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        if self._cold_copies is not None and not self._cold_copies.admits(len(node.value)):
            return 0
        return self.store_copy(node, write_back)

    def store_copy(self, node: TreeNode, write_back: bool = False) -> int:
        """Queue a node to be stored on donors, after its ancestors. Returns tokens, 0 for no room.

        Until the store has ended the node is locked, and its blocks count as in transfer.
        """
        # The parent evicts when a node does not fit. It does not fit either while its copies do
        # not; what eviction leaves without room is then stored with fewer.
        storable = write_back or node.parent is self.root_node or node.parent.backuped
        replicas = self.tier_pool.replicas
        if storable and replicas is not None and not self.tier_pool.has_room(len(node.value)):
            self.evict_host(len(node.value))
        backed_up: int = super().write_backup(node, write_back)
        return backed_up

    def note_without_copy(self) -> None:
        """Nodes on the device have lost their copies, and are to get others when there is room."""
        if self._cold_copies is not None:
            self._cold_copies.note_without_copy()

    def watch(self, scheduler: Scheduler) -> None:
        """The scheduler that uses this tree is complete, and begins to serve."""
        self._scheduler = scheduler
        settings = self.tier_pool.settings
        self._watchdog = Watchdog(scheduler, self, settings.watchdog_s)
        self._audit = Audit(scheduler, self, settings.audit_interval_s)

    def waits_for_donors(self, req: Req) -> bool:
        """Whether a request in the queue waits for memory, no longer than a deadline of its own."""
        return False

    def record_behind_forwards(self, event: Any) -> None:
        """Have an event come when the forwards are over that have been launched by now."""
        if self._scheduler is not None:
            event.record(self._scheduler.forward_stream)

    def cache_finished_req(self, req: Req, *args: Any, **kwargs: Any) -> None:
        super().cache_finished_req(req, *args, **kwargs)
        self._loads.request_ended()

    def loading_check(self, finish_count: int | None = None) -> None:
        loads = list(self.cache_controller.ack_load_queue)
        super().loading_check(finish_count)
        finished = len(loads) - len(self.cache_controller.ack_load_queue)
        for ack in loads[:finished]:
            if ack.timing_enabled:
                duration_ms = ack.start_event.elapsed_time(ack.finish_event)
                self.tier_pool.traffic.load_seconds.append(duration_ms / 1000)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        if self._verifier is not None:
            params = self._verifier.before_load(params)
        loaded, last_node = super().init_load_back(params)
        if self._verifier is not None:
            loaded, last_node = self._verifier.after_load(loaded, last_node)
        if params.req is not None:
            if len(loaded):
                cached = len(params.req.prefix_indices) + len(loaded)
                self.tier_pool.new_tokens += len(params.req.full_untruncated_fill_ids) - cached
            # A hit that was too short or found no device room is recomputed: report it so.
            params.req.host_hit_length = len(loaded)
        return loaded, last_node

    def ready_to_load_host_cache(self) -> int:
        """Called by the scheduler when a batch is complete: begins the loads of its requests."""
        consumer: int = super().ready_to_load_host_cache()
        self.tier_pool.new_tokens = 0
        return consumer

    def evict(self, params: EvictParams) -> EvictResult:
        """The pages of all nodes together: by itself, each node is two launches on a GPU."""
        allocator = self.token_to_kv_pool_allocator
        if not allocator.is_not_in_free_group:
            return super().evict(params)
        allocator.free_group_begin()
        try:
            return super().evict(params)
        finally:
            allocator.free_group_end()

    def _evict_regular(self, node: TreeNode) -> int:
        # The parent requires a leaf. With write-back a node may be left on the device alone while
        # its descendants live on donors only; without it they could not be reached any more.
        for child in list(node.children.values()):
            if not self._vacater.drop_subtree(child):
                return 0
        freed = self._free_on_device(node.value)
        node.value = node.value[:0]  # which the parent would free as `_free_on_device` does not
        super()._evict_regular(node)
        return freed

    def blocks_of_no_node(self) -> np.ndarray:
        """Donor blocks in use beside those of nodes, int64: copies."""
        replicas = self.tier_pool.replicas
        return np.empty(0, dtype=np.int64) if replicas is None else replicas.copy_ids()

    def status(self) -> dict[str, Any]:
        """Plain data for ``/server_info``: donors, blocks, hits by tier, bytes moved."""
        pool = self.tier_pool
        return {
            **pool.tier.status(),
            "block_bytes": pool.block_layout.block_bytes,
            "block_tokens": pool.page_size,
            "bytes": {"loaded": pool.loaded_bytes, "stored": pool.stored_bytes},
            "replicas": self._replica_status(),
            **pool.traffic.as_dict(),
            **self.stats.as_dict(),
            "stalls": 0 if self._watchdog is None else self._watchdog.stalls,
            "audits": {} if self._audit is None else self._audit.as_dict(),
        }

    def _replica_status(self) -> dict[str, int]:
        replicas, refiller = self.tier_pool.replicas, self._refiller
        return {
            "wanted": self.tier_pool.copies_wanted,
            "copies": 0 if replicas is None else replicas.copies,
            "short_blocks": 0 if replicas is None else replicas.short,
            "refilled_blocks": 0 if refiller is None else refiller.blocks,
        }
