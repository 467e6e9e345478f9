"""``DonorKVCache``: the pool below the device, whose slots are blocks of donor memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.runtime_context import get_server_args

from sglang.srt.swiftcache import donate_checks
from sglang.srt.swiftcache.elastic_pool import ElasticKVPool
from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool
from sglang.srt.swiftcache.page_major_paths import PageMajorPaths
from sglang.srt.swiftcache.paths import PathChooser, load_launches
from sglang.srt.swiftcache.traffic import Traffic
from sglang.srt.swiftcache.verify import BlockChecksums
from swiftcache_kernel import BlockLayout, LayerTransfer, PoolBuffers, copy_blocks
from swiftcache_kernel.copy_engine import CopyRefused
from swiftcache_kernel.page_major import PageMajorBuffers
from swiftcache_tier.blocks import NONE, Replicas
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.receiver.tier import DonorTier
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size
from swiftcache_tier.spec import parse_specs

logger = logging.getLogger(__name__)


class _Load(NamedTuple):
    """One load of SGLang's controller, resolved on its first layer."""

    host_indices: torch.Tensor
    device_indices: torch.Tensor
    blocks: np.ndarray
    first: LayerTransfer
    rest: LayerTransfer

    def of(self, layer_id: int) -> LayerTransfer:
        return self.rest if layer_id else self.first


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
        self.block_layout = block_layout(device_pool)
        self.size_per_token = self.get_size_per_token()
        self.lock = threading.RLock()
        self.loaded_bytes = 0
        self.stored_bytes = 0
        self.in_flight: Callable[[np.ndarray], np.ndarray] | None = None
        """Which of some blocks a launched forward may still use; None where none ever does."""
        self.new_tokens = 0
        """What the requests of the loads that are queued now compute themselves."""
        self._held_back = np.empty(0, dtype=np.int64)
        self._page_offsets = torch.arange(page_size, dtype=torch.int64)
        self._buffers = (
            PageMajorBuffers(self.block_layout, device_pool.raw_pages)
            if isinstance(device_pool, ElasticKVPool)
            else PoolBuffers(self.block_layout, device_pool.k_buffer, device_pool.v_buffer)
        )
        self._on_gpu = self._buffers.device.type == "cuda"
        self._load: _Load | None = None
        self._load_launches = load_launches(self.layer_num)

        args = get_server_args()
        self.settings = Settings.from_env()
        self.tier = DonorTier(
            parse_specs(args.swiftcache_donors),
            self.block_layout.block_bytes,
            settings=self.settings,
            runtime_dir=Path(args.swiftcache_runtime_dir),
            receiver_name=f"{Path(args.served_model_name).name}:{args.port}",
            device=str(self._buffers.device),
            own_donor=donate_checks.own_donor(args),
        )
        self.tier.start()
        self._paths = (
            PageMajorPaths(self._buffers, self.tier)
            if isinstance(self._buffers, PageMajorBuffers)
            else PathChooser(args.swiftcache_io_backend, self._buffers, self.tier)
        )
        self.checksums = BlockChecksums(self._buffers) if args.swiftcache_verify else None
        copies = args.swiftcache_replicas
        self.copies_wanted = copies
        self.replicas = Replicas(self.tier, copies) if copies > 1 else None
        self.traffic = Traffic(self.tier, self.block_layout.block_bytes, on_gpu=self._on_gpu)
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
        return self.tier.total_blocks // self.copies_wanted * self.page_size

    def get_size_per_token(self) -> int:
        """Bytes of one token in all layers, K and V."""
        return self.block_layout.block_bytes // self.page_size

    def available_size(self) -> int:
        """Tokens for which there are free blocks."""
        return self.tier.free_blocks // self.copies_wanted * self.page_size

    def has_room(self, tokens: int) -> bool:
        """Whether ``tokens`` more, whole pages, can be stored as often as wanted."""
        return self.tier.has_room(tokens // self.page_size, self.copies_wanted)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots for ``need_size`` tokens, whole pages: int64 [need_size] on the CPU.

        ``None`` if there are not as many; then nothing was taken.
        """
        if need_size % self.page_size:
            raise ValueError(f"{need_size} tokens are not whole pages of {self.page_size}")
        blocks = self.tier.alloc(need_size // self.page_size)
        if blocks is None:
            return None
        if self.replicas is not None:
            self.replicas.place(blocks)
        return self.slots_of(blocks)

    def free(self, indices: torch.Tensor) -> int:
        """Give slots back, whole pages. Returns their number."""
        if indices.numel():
            blocks = self.blocks_of(indices)
            self.release(blocks)
            if self.replicas is not None:
                self.replicas.forget(blocks)
            if self.checksums is not None:
                self.checksums.forget(blocks)
        return indices.numel()

    def release(self, blocks: np.ndarray) -> None:
        """Give blocks back to the tier, once no launched forward uses them any more."""
        if self.in_flight is None:
            self.tier.free(blocks)
            return
        waiting = np.concatenate([self._held_back, blocks])
        held = self.in_flight(waiting)
        self._held_back = waiting[held]
        self.tier.free(waiting[~held])

    def release_held(self) -> None:
        """Give back what `release` held back, as far as it is free now. Cheap if there is none."""
        if self._held_back.size:
            self.release(np.empty(0, dtype=np.int64))

    @property
    def blocks_held_back(self) -> int:
        """Given back, and still in use by a launched forward."""
        return len(self._held_back)

    def clear(self) -> None:
        """Free every slot: the tree was flushed. The memory stays with this server."""
        self._load = None
        self.new_tokens = 0
        self._wait_for_transfers()
        self._held_back = np.empty(0, dtype=np.int64)
        self.tier.free_all()
        if self.replicas is not None:
            self.replicas.clear()
        if self.checksums is not None:
            self.checksums.clear()

    def destroy(self) -> None:
        """Return all memory to the donors and end those this server owns. Idempotent."""
        self._wait_for_transfers()
        self.tier.close()

    def blocks_of(self, indices: torch.Tensor) -> np.ndarray:
        """Slots of whole pages [tokens] -> block ids, int64 [tokens // page_size]."""
        return (indices.view(-1, self.page_size)[:, 0] // self.page_size).cpu().numpy()

    def slots_of(self, blocks: np.ndarray) -> torch.Tensor:
        """Block ids [n] -> slots, int64 [n * page_size]."""
        first = torch.from_numpy(blocks).unsqueeze(1) * self.page_size
        return (first + self._page_offsets).view(-1)

    def pages_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Device slots of whole pages [tokens] -> pages, int64 [tokens // page_size] there."""
        return indices.view(-1, self.page_size)[:, 0] // self.page_size

    def copy_blocks(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks inside the tier; ids int64 [n], targets distinct and not sources.

        Has finished on return, so that the sources may be given back, to the tier itself.
        """
        self.write_copies(source, target)
        if self.replicas is not None:
            self.replicas.rename(source, target)
        if self.checksums is not None:
            self.checksums.move(source, target)

    def use_copies(self, blocks: np.ndarray, copies: np.ndarray) -> None:
        """Let copies take the place of their blocks, which are freed; ids int64 [n] both.

        Moves nothing. Nothing may read or write the blocks any more.
        """
        assert self.replicas is not None
        self.replicas.promote(blocks, copies)
        if self.checksums is not None:
            self.checksums.move(blocks, copies)
        self.tier.free(blocks)

    def write_copies(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy whole blocks and leave the books alone; ids int64 [n]. Has finished on return."""
        tables = (torch.from_numpy(self.tier.addresses(ids)) for ids in (source, target))
        copy_blocks(
            *(table.to(self._buffers.device) for table in tables),
            block_bytes=self.block_layout.block_bytes,
        )
        if self._on_gpu:
            torch.cuda.current_stream(self._buffers.device).synchronize()
        self.traffic.count("load", source)
        self.traffic.count("store", target)

    def load_to_device_per_layer(
        self,
        device_pool: MHATokenToKVPool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Queue the copy of one layer, donors -> device, on the current (load) stream.

        Both index tensors int64 [tokens], whole pages in the same order; host indices on the CPU.
        Layers are asked for in order, and some of them are copied together (``load_launches``): a
        later one of such is on its way already.
        """
        load = self._resolve(host_indices, device_indices)
        if layer_id == 0:
            self.traffic.load_begins(load.blocks)
        layers = self._load_launches.get(layer_id, 0)
        if layers:
            self._copy(
                lambda: (
                    self._resolve(host_indices, device_indices)
                    .of(layer_id)
                    .gather_layers(layer_id, layers)
                )
            )
        if layer_id == self.layer_num - 1 and not self._on_gpu:
            self.traffic.load_has_ended()
        self.loaded_bytes += load.first.blocks * self.block_layout.layer_bytes

    def store(
        self, host_indices: torch.Tensor, pages: torch.Tensor, host_pages: np.ndarray
    ) -> None:
        """Queue the copy of all layers, device -> donors, on the current (write) stream.

        host_indices: int64 [tokens] on the CPU, whole pages. pages: int64 [pages] on the device,
        in the same order, and ``host_pages`` the same on the host.
        """
        blocks = self.blocks_of(host_indices)
        self._scatter(blocks, pages, host_pages)
        if self.replicas is not None:
            for copies in self.replicas.of(blocks).T:
                self._store_copies(copies, pages, host_pages)
        if self.checksums is not None:
            self.checksums.record(blocks, pages)

    def _scatter(self, blocks: np.ndarray, pages: torch.Tensor, host_pages: np.ndarray) -> None:
        self._copy(lambda: self._paths.store(blocks, pages, host_pages).scatter_all())
        self.stored_bytes += len(blocks) * self.block_layout.block_bytes
        self.traffic.count("store", blocks)

    def _copy(self, queue: Callable[[], None]) -> None:
        """``queue`` copies by the path chosen for them; once more if the engines refuse."""
        try:
            queue()
        except CopyRefused as error:
            self._paths.give_up_copies(error)
            self._load = None  # which holds the path
            queue()

    def _store_copies(
        self, copies: np.ndarray, pages: torch.Tensor, host_pages: np.ndarray
    ) -> None:
        """Queue the copy of those of ``pages`` that have a block in ``copies``; int64 [n] all."""
        placed = copies != NONE
        if not placed.any():
            return
        if not placed.all():
            rows = torch.from_numpy(np.flatnonzero(placed))
            if self._on_gpu:  # from pageable memory the call would wait for the stream
                rows = rows.pin_memory().to(pages.device, non_blocking=True)
            pages = pages[rows]
        self._scatter(copies[placed], pages, host_pages[placed])

    def _resolve(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> _Load:
        """Addresses, pages and paths of a load; made on its first layer, kept for the rest.

        What is allocated on the GPU belongs to the current stream, which is the one that uses it,
        so it may be dropped as soon as the last copy is queued. The index tensors are the
        controller's, which keeps them alive (``record_stream``).
        """
        last = self._load
        if (
            last is None
            or last.host_indices is not host_indices
            or last.device_indices is not device_indices
        ):
            blocks, pages = self.blocks_of(host_indices), self.pages_of(device_indices)
            first, rest = self._paths.load(blocks, pages, self.new_tokens)
            last = self._load = _Load(host_indices, device_indices, blocks, first, rest)
        return last

    def _wait_for_transfers(self) -> None:
        """Until here, copies that nobody tracks any more may still read or write donor memory."""
        if self._on_gpu:
            torch.cuda.synchronize(self._buffers.device)

    # ``Stores`` stores by `store`; a storage tier below the donors is refused at start. So nothing
    # asks for these.

    def backup_from_device_all_layer(self, *_: Any) -> None:
        raise NotImplementedError("stores begin in `store`")

    def init_kv_buffer(self) -> torch.Tensor:
        raise NotImplementedError("donors own the memory")

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        raise NotImplementedError("no storage tier below donors")

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        raise NotImplementedError("no storage tier below donors")

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        raise NotImplementedError("no storage tier below donors")


def block_layout(pool: MHATokenToKVPool) -> BlockLayout:
    """The bytes of a block that holds one page of a device pool."""
    row_bytes = pool.head_num * pool.store_dtype.itemsize
    return BlockLayout(
        layers=pool.layer_num,
        page_tokens=pool.page_size,
        k_token_bytes=pool.head_dim * row_bytes,
        v_token_bytes=pool.v_head_dim * row_bytes,
    )


def _require_covered(pool: Any) -> None:
    # By exact type: every other subclass (fp4, mxfp8, ...) stores more or elsewhere.
    by_layer = type(pool) in (MHATokenToKVPool, StreamKVPool) and pool.kv_cache_layout == "nhd"
    covered = by_layer or type(pool) is ElasticKVPool
    # buffers without memory of their own until the graphs are captured could not be looked at now
    if not covered or pool.post_capture_active:
        layout = getattr(pool, "kv_cache_layout", "its own")
        raise SwiftCacheError(
            f"--swiftcache-donors does not cover {type(pool).__name__} in {layout} layout: "
            "serve this model without the flag"
        )
