"""``StreamKVPool``: SGLang's KV pool with a window whose memory all layers share."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang.srt.swiftcache.layer_stream.streamer import LayerStreamer
from swiftcache_tier.extents.aliased import AliasedBuffers, BufferSize


class StreamKVPool(MHATokenToKVPool):
    """``R`` regular and ``W`` window slots in every layer; to attention, an ordinary pool.

    Slots from ``first_window_slot`` on are the same memory in all layers of one parity, so they
    hold one layer at a time: every access to a layer's buffers enters it (`LayerStreamer.enter`).
    """

    def __init__(self, size: int, *, page_size: int, window_tokens: int, **kwargs: Any) -> None:
        """size: R + W tokens; ``window_tokens``: W. Both, and R plus a page, are whole units."""
        self.window_tokens = window_tokens
        self.first_window_slot = size - window_tokens + page_size
        self.streamer: LayerStreamer | None = None
        self._memory: AliasedBuffers | None = None
        super().__init__(size, page_size=page_size, **kwargs)

    @property
    def regular_tokens(self) -> int:
        """R."""
        return int(self.size) - self.window_tokens

    def _create_buffers_normal(self) -> None:
        rows = self.size + self.page_size
        shapes = [(rows, self.head_num, dim) for dim in (self.head_dim, self.v_head_dim)]
        sizes = []
        for shape in shapes:
            row_bytes = math.prod(shape[1:]) * self.store_dtype.itemsize
            own, window = self.first_window_slot * row_bytes, self.window_tokens * row_bytes
            sizes.append(BufferSize(own, window))
        device = torch.device(self.device)
        name = "cpu" if device.type == "cpu" else f"cuda:{torch.cuda.current_device()}"
        self._memory = AliasedBuffers(name, self.layer_num, *sizes)
        self.k_buffer, self.v_buffer = (
            [
                tensor_at(self._memory.address(side, layer), shape, self.store_dtype, name)
                for layer in range(self.layer_num)
            ]
            for side, shape in enumerate(shapes)
        )

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Memory that K and V take: the window counts twice, not once a layer."""
        sides = []
        for buffer in (self.k_buffer[0], self.v_buffer[0]):
            row_bytes = buffer[0].nbytes
            own = self.layer_num * self.first_window_slot * row_bytes
            sides.append(own + min(2, self.layer_num) * self.window_tokens * row_bytes)
        return sides[0], sides[1]

    # All three are called with the number of the layer by every attention backend and by the fused
    # kernels that write K and V themselves. Whichever comes first in a layer is its first touch.

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        self._enter(layer_id)
        return super().get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        self._enter(layer_id)
        return super().get_value_buffer(layer_id)

    def set_kv_buffer(self, layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> None:
        override = kwargs.get("layer_id_override")
        self._enter(layer.layer_id if override is None else override)
        super().set_kv_buffer(layer, loc_info, *args, **kwargs)

    def _enter(self, layer_id: int) -> None:
        if self.streamer is not None:
            self.streamer.enter(layer_id - self.start_layer)


def tensor_at(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A tensor over memory that stays mapped for as long as it is used."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if device == "cpu":
        memory = (ctypes.c_char * size_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)
    # The interface has no bfloat16 and no float8, so the bytes are named and viewed.
    tensor = torch.as_tensor(_CudaBytes(address, size_bytes), device=device)
    if tensor.data_ptr() != address:
        raise RuntimeError(f"PyTorch copied the memory at {address:#x} instead of using it")
    return tensor.view(dtype).view(shape)


class _CudaBytes:
    """Memory of a GPU, for whoever reads ``__cuda_array_interface__``."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }
