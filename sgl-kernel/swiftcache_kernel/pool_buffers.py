"""The buffers of a device KV pool, looked at once instead of at every copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swiftcache_kernel.arguments import check_buffers, check_device_type
from swiftcache_kernel.layout import BlockLayout


class PoolBuffers:
    """One K and one V buffer for each layer of `layout`, kept alive by this object.

    k, v: contiguous [slots, heads, dim], as many slots in all of them, all on one "cpu" or "cuda"
    device. ValueError, one line, if they are not. The buffers must not be replaced or moved as
    long as this is used. Any thread may read it.
    """

    def __init__(
        self, layout: BlockLayout, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]
    ) -> None:
        if not len(k) == len(v) == layout.layers:
            raise ValueError(
                f"k has {len(k)} layers, v has {len(v)}; the layout expects {layout.layers}"
            )
        for layer, (k_layer, v_layer) in enumerate(zip(k, v, strict=True)):
            try:
                check_buffers(k_layer, v_layer, layout)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from None
            if k_layer.device != k[0].device or len(k_layer) != len(k[0]):
                raise ValueError(
                    f"layer {layer} has {len(k_layer)} slots on {k_layer.device}, layer 0 has "
                    f"{len(k[0])} on {k[0].device}; expected the same in all layers"
                )
        self.layout = layout
        self.k = tuple(k)
        self.v = tuple(v)
        self.device: torch.device = k[0].device
        check_device_type(self.device)
        self.pages = len(k[0]) // layout.page_tokens
        self.k_addresses = [buffer.data_ptr() for buffer in k]
        self.v_addresses = [buffer.data_ptr() for buffer in v]
        addresses = list(zip(self.k_addresses, self.v_addresses, strict=True))
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        """int64 [layers, 2] on the pool's device: where K and V of each layer begin."""
        self.alignment_bytes = math.gcd(
            layout.alignment_bytes, *self.k_addresses, *self.v_addresses
        )
        """The largest power of two, at most 16, that divides every address and run."""
