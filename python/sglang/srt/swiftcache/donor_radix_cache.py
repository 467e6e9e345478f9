"""``DonorRadixCache``: SGLang's two-tier radix tree, with donors as the second tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache
from sglang.srt.swiftcache.tier_stats import TierStats
from sglang.srt.swiftcache.vacate import Vacater
from sglang.srt.swiftcache.verify import LoadVerifier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from sglang.srt.server_args import ServerArgs


class DonorRadixCache(HiRadixCache):
    """Prefix KV on the device and on donors. Scheduler thread only.

    HiCache's seam is kept: ``node.value`` is device slots, ``node.host_value`` donor slots; write
    policies, load-back and eviction (LRU in both tiers) are the parent's. Added here: donors join
    and leave while the server runs, and what lies in their memory follows (``vacate``).
    """

    token_to_kv_pool_host: DonorKVCache

    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        self.stats = TierStats()
        super().__init__(params=params, server_args=server_args)
        self._vacater = Vacater(self)
        checksums = self.tier_pool.checksums
        self._verifier = None if checksums is None else LoadVerifier(self, self._vacater, checksums)

    @property
    def tier_pool(self) -> DonorKVCache:
        return self.token_to_kv_pool_host

    def check_hicache_events(self) -> None:
        """Called by the scheduler at every step, also when idle or only decoding."""
        super().check_hicache_events()
        self.tier_pool.tier.poll()
        self._vacater.step()

    def nodes_in_transfer(self) -> set[TreeNode]:
        """Nodes whose device pages or donor blocks a transfer is reading or writing."""
        return self._vacater.in_flight()

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        if self._verifier is not None:
            params = self._verifier.before_load(params)
        loaded, last_node = super().init_load_back(params)
        if self._verifier is not None:
            loaded, last_node = self._verifier.after_load(loaded, last_node)
        if params.req is not None:
            # A hit that was too short or found no device room is recomputed: report it so.
            params.req.host_hit_length = len(loaded)
        return loaded, last_node

    def _evict_regular(self, node: TreeNode) -> int:
        # The parent requires a leaf. With write-back a node may be left on the device alone while
        # its descendants live on donors only; without it they could not be reached any more.
        for child in list(node.children.values()):
            if not self._vacater.drop_subtree(child):
                return 0
        freed: int = super()._evict_regular(node)
        return freed

    def status(self) -> dict[str, Any]:
        """Plain data for ``/server_info``: donors, blocks, hits by tier, bytes moved."""
        pool = self.tier_pool
        return {
            **pool.tier.status(),
            "block_bytes": pool.block_layout.block_bytes,
            "block_tokens": pool.page_size,
            "bytes": {"loaded": pool.loaded_bytes, "stored": pool.stored_bytes},
            **self.stats.as_dict(),
        }
