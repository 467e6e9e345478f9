"""Attention over all tokens of a step's requests, by whichever library is here."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from layer_stream_step import DTYPE, Attention, Shape
from torch.nn import functional

Make = Callable[[Shape, torch.Tensor, int], Attention]
"""For requests whose tokens lie in `slots`, int64 [batch, tokens], in whole pages."""


def flashinfer(shape: Shape, slots: torch.Tensor, page_tokens: int) -> Attention:
    """As SGLang calls it: pages of one token, tensor cores for four query heads to a KV head."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, tokens = slots.shape
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=slots.device) * tokens
    indices = slots.flatten().int()
    lengths = torch.ones(batch, dtype=torch.int32, device=slots.device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(512 << 20, dtype=torch.uint8, device=slots.device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices,
        paged_kv_last_page_len_buffer=lengths,
    )
    sizes = shape.heads, shape.kv_heads, shape.head_dim
    wrapper.plan(indptr, indices, lengths, *sizes, 1, q_data_type=DTYPE, kv_data_type=DTYPE)
    return lambda q, k, v: wrapper.run(q, (k.unsqueeze(1), v.unsqueeze(1)))


def fa3(shape: Shape, slots: torch.Tensor, page_tokens: int) -> Attention:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    batch, tokens = slots.shape
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=slots.device)
    pages = (slots[:, ::page_tokens] // page_tokens).int()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        paged_k, paged_v = (each.unflatten(0, (-1, page_tokens)) for each in (k, v))
        return flash_attn_with_kvcache(
            q.unsqueeze(1),
            paged_k,
            paged_v,
            cache_seqlens=lengths,
            page_table=pages,
            causal=True,
        )

    return attend


def sdpa(shape: Shape, slots: torch.Tensor, page_tokens: int) -> Attention:
    """PyTorch's own, which knows no pages: reads the first slots, as many as there are tokens."""
    batch, tokens = slots.shape

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (
            each[: batch * tokens].unflatten(0, (batch, tokens)).transpose(1, 2) for each in (k, v)
        )
        return functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

    return attend


LIBRARIES: dict[str, Make] = {"fa3": fa3, "flashinfer": flashinfer, "sdpa": sdpa}


def first_that_works(shape: Shape, device: torch.device) -> str:
    """Compiles it, where it is compiled on first use."""
    slots = torch.arange(64, device=device).view(1, 64)
    q = torch.zeros(1, shape.heads, shape.head_dim, dtype=DTYPE, device=device)
    kv = torch.zeros(64, shape.kv_heads, shape.head_dim, dtype=DTYPE, device=device)
    for name, make in LIBRARIES.items():
        try:
            make(shape, slots, 16)(q, kv, kv)
        except Exception as error:  # not installed, or nothing to compile it with
            reason = str(error).partition("\n")[0]
            print(f"{name} is left out: {type(error).__name__}: {reason}", file=sys.stderr)
        else:
            return name
    raise RuntimeError("none of the attention libraries works here")
