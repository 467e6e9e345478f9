"""Whole blocks from donor memory to donor memory, checked byte by byte.

Every test runs on what a CPU build uses and, where there is no GPU, on the Triton kernel under
its interpreter.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.cases import make_accessible, reserved

from swiftcache_kernel import copy_blocks, triton_block_copy

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

Copy = Callable[..., None]
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernel is compiled here, see test_block_copy_gpu"
)
each_backend = pytest.mark.parametrize(
    "copy",
    [
        pytest.param(copy_blocks, id="cpu"),
        pytest.param(triton_block_copy.copy_blocks, id="triton", marks=interpreted),
    ],
)


def check(copy: Copy, base: int, size: int, moves: list[tuple[int, int]], block: int) -> None:
    """`moves` are offsets, from and to; compares all `size` bytes at `base` afterwards."""
    expected = bytearray(ctypes.string_at(base, size))
    for from_offset, to_offset in moves:
        expected[to_offset : to_offset + block] = ctypes.string_at(base + from_offset, block)
    source, target = (
        torch.tensor([base + move[end] for move in moves], dtype=torch.int64) for end in (0, 1)
    )
    copy(source, target, block_bytes=block)
    assert ctypes.string_at(base, size) == expected


@each_backend
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    block=st.integers(1, 400) | st.sampled_from([16384, 16384 + 8, 40_000, 4097]),
    blocks=st.integers(2, 8),
)
def test_any_blocks_to_any_others(copy: Copy, data: st.DataObject, block: int, blocks: int) -> None:
    order = data.draw(st.permutations(range(blocks)))
    targets = order[: data.draw(st.integers(1, blocks - 1))]
    sources = data.draw(
        st.lists(
            st.sampled_from(order[len(targets) :]), min_size=len(targets), max_size=len(targets)
        )
    )
    moves = [(s * block, t * block) for s, t in zip(sources, targets, strict=True)]
    with reserved(blocks * block) as base:
        make_accessible(base, blocks * block, seed=1)
        check(copy, base, blocks * block, moves, block)


@each_backend
def test_ranges_with_unmapped_holes_between(copy: Copy) -> None:
    block = 3 * 4096
    with reserved(1 << 40) as base:
        for row in (1, 5_000_000, 80_000_000):
            make_accessible(base + row * block, block, seed=row)
        rows = torch.tensor([1, 80_000_000]), torch.tensor([5_000_000, 1])
        copied = ctypes.string_at(base + block, block)
        for source, target in ((rows[0][:1], rows[1][:1]), (rows[0][1:], rows[1][1:])):
            copy(base + source * block, base + target * block, block_bytes=block)
        assert ctypes.string_at(base + 5_000_000 * block, block) == copied
        last = ctypes.string_at(base + 80_000_000 * block, block)
        assert ctypes.string_at(base + block, block) == last


@interpreted
@pytest.mark.parametrize("programs", [1, 3, 1000])
def test_any_grid_copies_all_tiles(programs: int) -> None:
    block = 5 * 16384 + 48
    with reserved(6 * block) as base:
        make_accessible(base, 6 * block, seed=2)
        moves = [(block, 0), (3 * block, 4 * block), (block, 5 * block)]

        def copy(source: torch.Tensor, target: torch.Tensor, *, block_bytes: int) -> None:
            triton_block_copy.copy_blocks(
                source, target, block_bytes=block_bytes, programs=programs
            )

        check(copy, base, 6 * block, moves, block)


def test_on_the_cpu_addresses_may_have_any_alignment() -> None:
    with reserved(4096) as base:
        make_accessible(base, 4096, seed=3)
        check(copy_blocks, base, 4096, [(1, 1003), (2003, 3002)], block=992)


NUMBERS = torch.zeros(2, dtype=torch.int64)
BROKEN = [
    ({"target": NUMBERS[:1]}, "2 sources, 1 targets; expected as many"),
    ({"source": NUMBERS.to(torch.int32)}, "source is contiguous int32 [2]; expected contiguous"),
    ({"target": NUMBERS.view(1, 2)}, "target is contiguous int64 [1, 2]; expected contiguous"),
    ({"target": NUMBERS.to("meta")}, "source is on cpu, target on meta; expected one device"),
    ({"block_bytes": 0}, "block_bytes is 0; expected more than 0"),
    (
        {"source": NUMBERS.to("meta"), "target": NUMBERS.to("meta")},
        "k is on device type 'meta'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_arguments(changes: dict[str, object], message: str) -> None:
    arguments = {"source": NUMBERS, "target": NUMBERS, "block_bytes": 16}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        copy_blocks(**{**arguments, **changes})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_no_blocks_copy_nothing() -> None:
    copy_blocks(NUMBERS[:0], NUMBERS[:0], block_bytes=16)
