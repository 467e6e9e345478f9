"""``DonorKVCache``: the pool below the device, whose slots are blocks of donor memory."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.runtime_context import get_server_args

from swiftcache_kernel import BlockLayout, copy_blocks, gather_layer, scatter_layer
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.receiver.tier import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import parse_specs

logger = logging.getLogger(__name__)


class _Transfer(NamedTuple):
    """Where one operation copies: the same for each of its layers."""

    host_indices: torch.Tensor
    device_indices: torch.Tensor
    table: torch.Tensor  # int64 [blocks], addresses
    pages: torch.Tensor  # int64 [blocks], pages of the device pool


class DonorKVCache(HostKVCache):
    """SGLang's host pool, kept in memory that donors lend.

    To the radix tree a slot is a token: slot ``block * page_size + offset``. A block holds one
    page, ``[layer][k|v][token][head][dim]``, so that one layer of it is one contiguous run.

    The pool grows and shrinks while the server runs. Scheduler thread only, as the tree is.
    """

    def __init__(
        self,
        device_pool: MHATokenToKVPool,
        host_to_device_ratio: float,
        host_size: int,
        page_size: int,
        layout: str,
        allocator_type: str = "default",
    ) -> None:
        """Join the donors that ``--swiftcache-donors`` names and wait for their memory.

        Of HiCache's arguments only the pool and the page size matter: donors decide how much
        there is, and the layout is block-major. The parent's constructor is not called, since it
        sizes the pool by free host RAM and allocates it.

        Raises:
            SwiftCacheError: a pool the tier does not cover, or a donor that did not grant memory.
        """
        _require_covered(device_pool)
        self.device_pool = device_pool
        self.page_size = page_size
        self.layout = "block_major"
        self.pin_memory = False
        self.device = "cpu"
        self.dtype = device_pool.store_dtype
        self.can_use_write_back_jit = False
        self.layer_num = device_pool.layer_num
        self.start_layer = device_pool.start_layer
        self.end_layer = device_pool.end_layer
        self.block_layout = BlockLayout(
            layers=self.layer_num,
            page_tokens=page_size,
            k_token_bytes=device_pool.head_num * device_pool.head_dim * self.dtype.itemsize,
            v_token_bytes=device_pool.head_num * device_pool.v_head_dim * self.dtype.itemsize,
        )
        self.size_per_token = self.get_size_per_token()
        self.lock = threading.RLock()
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self._page_offsets = torch.arange(page_size, dtype=torch.int64)
        self._transfer: _Transfer | None = None

        args = get_server_args()
        self.settings = Settings.from_env()
        self.tier = DonorTier(
            parse_specs(args.swiftcache_donors),
            self.block_layout.block_bytes,
            settings=self.settings,
            runtime_dir=Path(args.swiftcache_runtime_dir),
            receiver_name=f"{Path(args.served_model_name).name}:{args.port}",
        )
        self.tier.start()
        logger.info(
            "SwiftCache tier: %d blocks of %s (%d tokens, %s) from %d donor(s), device pool: "
            "%d tokens",
            self.tier.total_blocks,
            format_size(self.block_layout.block_bytes),
            self.size,
            format_size(self.tier.total_blocks * self.block_layout.block_bytes),
            len(self.tier.status()["donors"]),
            device_pool.size,
        )

    @property
    def size(self) -> int:
        """Tokens the donors can hold at the moment."""
        return self.tier.total_blocks * self.page_size

    def get_size_per_token(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.block_layout.block_bytes // self.page_size

    def available_size(self) -> int:
        """Tokens for which there is a free block."""
        return self.tier.free_blocks * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots for ``need_size`` tokens, whole pages: int64 [need_size] on the CPU.

        ``None`` if there are not as many; then nothing was taken.
        """
        if need_size % self.page_size:
            raise ValueError(f"{need_size} tokens are not whole pages of {self.page_size}")
        blocks = self.tier.alloc(need_size // self.page_size)
        return None if blocks is None else self.slots_of(blocks)

    def free(self, indices: torch.Tensor) -> int:
        """Give slots back, whole pages. Returns their number."""
        if indices.numel():
            self.tier.free(self.blocks_of(indices))
        return indices.numel()

    def clear(self) -> None:
        """Free every slot: the tree was flushed. The memory stays with this server."""
        self._transfer = None
        self.tier.free_all()

    def destroy(self) -> None:
        """Return all memory to the donors and end those this server owns. Idempotent."""
        self.tier.close()

    def blocks_of(self, indices: torch.Tensor) -> np.ndarray:
        """Slots of whole pages [tokens] -> block ids, int64 [tokens // page_size]."""
        return (indices.view(-1, self.page_size)[:, 0] // self.page_size).cpu().numpy()

    def slots_of(self, blocks: np.ndarray) -> torch.Tensor:
        """Block ids [n] -> slots, int64 [n * page_size]."""
        first = torch.from_numpy(blocks).unsqueeze(1) * self.page_size
        return (first + self._page_offsets).view(-1)

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks inside the tier; ids int64 [n], targets distinct and not sources."""
        copy_blocks(
            torch.from_numpy(self.tier.addresses(source)),
            torch.from_numpy(self.tier.addresses(target)),
            block_bytes=self.block_layout.block_bytes,
        )

    def load_to_device_per_layer(
        self,
        device_pool: MHATokenToKVPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Copy one layer, donors -> device, on the current (load) stream.

        Both index tensors int64 [tokens], whole pages in the same order.
        """
        transfer = self._resolve(host_indices, device_indices)
        gather_layer(
            transfer.table,
            transfer.pages,
            device_pool.k_buffer[layer_id],
            device_pool.v_buffer[layer_id],
            layout=self.block_layout,
            layer=layer_id,
        )
        self.loaded_bytes += len(transfer.table) * self.block_layout.layer_bytes

    def backup_from_device_all_layer(
        self,
        device_pool: MHATokenToKVPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy all layers, device -> donors, on the current (write) stream.

        Both index tensors int64 [tokens], whole pages in the same order.
        """
        transfer = self._resolve(host_indices, device_indices)
        for layer in range(self.layer_num):
            scatter_layer(
                transfer.table,
                transfer.pages,
                device_pool.k_buffer[layer],
                device_pool.v_buffer[layer],
                layout=self.block_layout,
                layer=layer,
            )
        self.stored_bytes += len(transfer.table) * self.block_layout.block_bytes

    def _resolve(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> _Transfer:
        """Addresses and pages of an operation; computed on its first layer, kept for the rest."""
        last = self._transfer
        if (
            last is None
            or last.host_indices is not host_indices
            or last.device_indices is not device_indices
        ):
            table = torch.from_numpy(self.tier.addresses(self.blocks_of(host_indices)))
            pages = device_indices.view(-1, self.page_size)[:, 0] // self.page_size
            last = _Transfer(host_indices, device_indices, table, pages)
            self._transfer = last
        return last

    # A storage tier below the donors is refused at start, so nothing asks for these.

    def init_kv_buffer(self) -> torch.Tensor:
        raise NotImplementedError("donors own the memory")

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError("no storage tier below donors")

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        raise NotImplementedError("no storage tier below donors")

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise NotImplementedError("no storage tier below donors")


def _require_covered(pool: Any) -> None:
    # By exact type: every subclass (fp4, mxfp8, page-major, ...) stores more or elsewhere.
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        layout = getattr(pool, "kv_cache_layout", "its own")
        raise SwiftCacheError(
            f"--swiftcache-donors does not cover {type(pool).__name__} in {layout} layout: "
            "serve this model without the flag"
        )
