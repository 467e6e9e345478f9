"""Donor memory, pools and byte-by-byte expectations shared by the kernel tests.

Expectations are built from `ctypes.string_at` and Python slices alone, so they share no code
with what they check.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from swiftcache_kernel import BlockLayout

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float32,
]
PAGE_SIZES = [1, 16, 64]

Move = Callable[..., None]


@dataclass(frozen=True)
class Shape:
    """One model's KV shape at one page size."""

    dtype: torch.dtype
    page_tokens: int
    layers: int = 3
    heads: int = 2
    k_dim: int = 64
    v_dim: int = 64

    @property
    def layout(self) -> BlockLayout:
        token = self.heads * self.dtype.itemsize
        return BlockLayout(self.layers, self.page_tokens, token * self.k_dim, token * self.v_dim)

    def pool(self, pages: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's K and V buffers, filled with random bits (NaNs of all kinds included)."""
        generator = torch.Generator().manual_seed(seed)
        k, v = (
            torch.randint(
                0,
                256,
                (pages * self.page_tokens, self.heads, dim * self.dtype.itemsize),
                dtype=torch.uint8,
                generator=generator,
            ).view(self.dtype)
            for dim in (self.k_dim, self.v_dim)
        )
        return k, v


MODEL_SHAPES = [
    {"heads": 2, "k_dim": 64, "v_dim": 64},
    {"heads": 3, "k_dim": 64, "v_dim": 64},
    {"heads": 1, "k_dim": 80, "v_dim": 80},
    {"heads": 2, "k_dim": 96, "v_dim": 64},
    {"heads": 1, "k_dim": 5, "v_dim": 3},
]


def all_shapes() -> list[Shape]:
    """Every model shape at every page size, and every dtype, without the full product."""
    shapes = [Shape(torch.bfloat16, page, **model) for page in PAGE_SIZES for model in MODEL_SHAPES]
    return shapes + [Shape(dtype, 16, heads=3) for dtype in DTYPES[1:]]


def shapes() -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        dtype=st.sampled_from(DTYPES),
        page_tokens=st.sampled_from(PAGE_SIZES),
        layers=st.integers(1, 4),
        heads=st.integers(1, 4),
        k_dim=st.integers(1, 20),
        v_dim=st.integers(1, 20),
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a contiguous tensor, on any device."""
    host = tensor.cpu()
    return ctypes.string_at(host.data_ptr(), host.nbytes)


def expect_gather(
    read: Callable[[int, int], bytes],
    table: Sequence[int],
    pages: Sequence[int],
    k: bytes,
    v: bytes,
    layout: BlockLayout,
    layer: int,
) -> tuple[bytes, bytes]:
    """The bytes of K and V after a gather; `read(address, size)` gives donor bytes."""
    after_k, after_v = bytearray(k), bytearray(v)
    k_run = layout.page_tokens * layout.k_token_bytes
    v_run = layout.page_tokens * layout.v_token_bytes
    for address, page in zip(table, pages, strict=True):
        start = address + layer * (k_run + v_run)
        after_k[page * k_run : (page + 1) * k_run] = read(start, k_run)
        after_v[page * v_run : (page + 1) * v_run] = read(start + k_run, v_run)
    return bytes(after_k), bytes(after_v)


def expect_scatter(
    memory: bytes,
    base: int,
    table: Sequence[int],
    pages: Sequence[int],
    k: bytes,
    v: bytes,
    layout: BlockLayout,
    layer: int,
) -> bytes:
    """The bytes of the donor memory that starts at address `base`, after a scatter."""
    after = bytearray(memory)
    k_run = layout.page_tokens * layout.k_token_bytes
    v_run = layout.page_tokens * layout.v_token_bytes
    for address, page in zip(table, pages, strict=True):
        start = address - base + layer * (k_run + v_run)
        after[start : start + k_run] = k[page * k_run : (page + 1) * k_run]
        start += k_run
        after[start : start + v_run] = v[page * v_run : (page + 1) * v_run]
    return bytes(after)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


@contextmanager
def reserved(size: int) -> Iterator[int]:
    """The address of `size` bytes of address space in which any access is a SIGSEGV."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc.mmap(None, size, 0, flags, -1, 0)
    assert address not in (None, _MAP_FAILED), f"mmap: errno {ctypes.get_errno()}"
    try:
        yield address
    finally:
        assert _libc.munmap(address, size) == 0


def make_accessible(address: int, size: int, seed: int) -> None:
    """Open the whole memory pages that hold these bytes and fill the bytes at random."""
    first = address - address % mmap.PAGESIZE
    opened = _libc.mprotect(first, address + size - first, mmap.PROT_READ | mmap.PROT_WRITE)
    assert opened == 0, f"mprotect: errno {ctypes.get_errno()}"
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    ctypes.memmove(address, data.data_ptr(), size)
