"""``ElasticKVPool``: SGLang's page-major KV pool on memory that can be lent, extent by extent."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.layout.page_major import build_page_major_mha_views
from sglang.srt.mem_cache.memory_pool import PageMajorMHATokenToKVPool

from swiftcache_tier.blocks.meu import donor_extent
from swiftcache_tier.blocks.page_map import PageMap
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.extents.neighbours import runs_of
from swiftcache_tier.extents.pool_memory import PoolMemory, granularity_bytes
from swiftcache_tier.settings import Settings
from swiftcache_tier.sizes import format_size

logger = logging.getLogger(__name__)


class ElasticKVPool(PageMajorMHATokenToKVPool):
    """A page is one run of bytes, ``[layer][k|v][token][head][dim]``, as a donor block is.

    Addresses never change: an extent stays mapped here while it is lent, so captured graphs go on,
    and padded rows of a batch may still read it. Nothing may be written there meanwhile.
    """

    def _create_buffers(self) -> None:
        device = _device_name(self.device)
        page_bytes = self.page_size * sum(
            self.layer_num * self.head_num * dim * self.store_dtype.itemsize
            for dim in (self.head_dim, self.v_head_dim)
        )
        pages = self.size // self.page_size + 1
        extent = donor_extent(
            page_bytes,
            granularity_bytes=granularity_bytes(device),
            wanted_bytes=Settings.from_env().extent_bytes,
        )
        self.page_map = PageMap(page_bytes, pages, extent.extent_bytes)
        if self.page_map.extents < 2:
            raise SwiftCacheError(
                f"--swiftcache-donate: the KV pool of {format_size(pages * page_bytes)} is no more "
                f"than one extent of {format_size(extent.extent_bytes)}, and the first is never "
                f"lent: enlarge the pool, or set SWIFTCACHE_EXTENT_BYTES lower"
            )
        self.memory = PoolMemory(device, extent.extent_bytes, self.page_map.extents)
        self._raw = _tensor_over(self.memory.base, self.memory.size_bytes, self.device)
        self.k_buffer, self.v_buffer = build_page_major_mha_views(
            self._raw[: pages * page_bytes],
            layer_num=self.layer_num,
            head_num=self.head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            store_dtype=self.store_dtype,
            page_size=self.page_size,
            num_pages=pages,
        )
        self._note_addresses()
        logger.info(
            "SwiftCache: KV pool in %d extents of %s, %g pages of %s each",
            self.page_map.extents,
            format_size(extent.extent_bytes),
            self.page_map.extent_pages,
            format_size(page_bytes),
        )

    @property
    def raw_pages(self) -> torch.Tensor:
        """All pages as bytes, uint8 [pages, page_bytes]."""
        page_map = self.page_map
        return self._raw[: page_map.pages * page_map.page_bytes].view(page_map.pages, -1)

    def zero_extents(self, slots: Iterable[int]) -> None:
        """Queue zeros for whole extents on the current stream; neighbours take one kernel."""
        size = self.page_map.extent_bytes
        for run in runs_of(slots):
            self._raw[run.start * size : run.stop * size].zero_()

    def _note_addresses(self) -> None:
        """What SGLang's kernels and transfers read instead of the tensors."""
        buffers = (self.k_buffer, self.v_buffer)
        self.k_data_ptrs, self.v_data_ptrs = (
            torch.tensor([view.data_ptr() for view in views], dtype=torch.uint64).to(self.device)
            for views in buffers
        )
        self.data_ptrs = torch.cat([self.k_data_ptrs, self.v_data_ptrs])
        self.data_strides = torch.full(
            (2 * self.layer_num,), self.page_map.page_bytes, device=self.device
        )

    # SGLang's store into this layout is a Triton kernel and its CPU attention indexes by token.

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        if self._raw.is_cuda:
            super()._store_kv_layer(layer_idx, loc, cache_k, cache_v)
            return
        page, slot = loc // self.page_size, loc % self.page_size
        self.k_buffer[layer_idx][page, slot] = cache_k
        self.v_buffer[layer_idx][page, slot] = cache_v

    def _get_key_buffer(self, layer_id: int) -> Any:
        view = super()._get_key_buffer(layer_id)
        return view if view.is_cuda else _ByToken(view)

    def _get_value_buffer(self, layer_id: int) -> Any:
        view = super()._get_value_buffer(layer_id)
        return view if view.is_cuda else _ByToken(view)


class _ByToken:
    """One layer's K or V, looked up by token ids: what the torch_native backend asks of it."""

    def __init__(self, view: torch.Tensor) -> None:
        """view: [pages, page_size, heads, dim]."""
        self._view = view

    def __getitem__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [n] -> [n, heads, dim], a copy."""
        page_size = self._view.shape[1]
        return self._view[tokens // page_size, tokens % page_size]

    @property
    def dtype(self) -> torch.dtype:
        return self._view.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self._view.shape[0] * self._view.shape[1], *self._view.shape[2:]))


class _CudaBytes:
    """Memory at an address, for ``torch.as_tensor``."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def _tensor_over(address: int, size_bytes: int, device: str) -> torch.Tensor:
    """The bytes at an address, uint8 [size_bytes], not owned."""
    if _device_name(device) == "cpu":
        memory = (ctypes.c_uint8 * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.as_tensor(_CudaBytes(address, size_bytes), device=_device_name(device))


def _device_name(device: str) -> str:
    """ "cpu" or "cuda:N": SGLang says "cuda" for the current one."""
    found = torch.device(device)
    if found.type == "cpu":
        return "cpu"
    index = torch.cuda.current_device() if found.index is None else found.index
    return f"cuda:{index}"
