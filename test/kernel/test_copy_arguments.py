"""Arguments that break the contract are named in one line."""

from __future__ import annotations

import re

import pytest
import torch
from kernel.cases import Move, Shape, bytes_of, make_accessible, reserved

from swiftcache_kernel import gather_layer, scatter_layer

SHAPE = Shape(torch.bfloat16, page_tokens=16, layers=3, heads=2, k_dim=64, v_dim=32)
EMPTY = torch.empty(0, dtype=torch.int64)
both_ways = pytest.mark.parametrize("move", [gather_layer, scatter_layer])


def call(move: Move, **changes: object) -> None:
    """Move one block that may be read and written, with some arguments replaced."""
    with reserved(SHAPE.layout.block_bytes) as base:
        make_accessible(base, SHAPE.layout.block_bytes, seed=1)
        k, v = SHAPE.pool(4, seed=2)
        arguments = {
            "table": torch.tensor([base]),
            "pages": torch.tensor([3]),
            "k": k,
            "v": v,
            "layout": SHAPE.layout,
            "layer": 0,
        }
        move(**{**arguments, **changes})


@both_ways
def test_unchanged_arguments_are_fine(move: Move) -> None:
    call(move)


K, V = SHAPE.pool(4, seed=2)
BROKEN = [
    ({"layer": 3}, "layer is 3; expected 0 to 2"),
    ({"layer": -1}, "layer is -1; expected 0 to 2"),
    ({"table": torch.zeros(1, dtype=torch.int32)}, "table is contiguous int32 [1]; expected"),
    ({"table": torch.zeros(1, 1, dtype=torch.int64)}, "table is contiguous int64 [1, 1]; expected"),
    ({"pages": torch.zeros(1)}, "pages is contiguous float32 [1]; expected"),
    ({"pages": torch.zeros(4, dtype=torch.int64)[::2]}, "pages is non-contiguous int64 [2]"),
    ({"pages": torch.zeros(2, dtype=torch.int64)}, "table has 1 blocks, pages has 2"),
    ({"pages": torch.zeros(1, dtype=torch.int64, device="meta")}, "pages is on meta, k on cpu"),
    ({"v": V.to("meta")}, "v is on meta, k on cpu"),
    ({"k": K.view(64, -1)}, "k is contiguous bfloat16 [64, 128]; expected"),
    ({"k": K.transpose(0, 1)}, "k is non-contiguous bfloat16 [2, 64, 64]; expected"),
    ({"k": K.to(torch.float32)}, "k has 512 bytes per token; the layout expects 256"),
    ({"v": K}, "v has 256 bytes per token; the layout expects 128"),
    ({"v": V[:48]}, "k has 64 slots, v has 48"),
    ({"pages": torch.tensor([4])}, "pages run from 4 to 4; expected 0 to 3"),
    ({"pages": torch.tensor([-1])}, "pages run from -1 to -1; expected 0 to 3"),
    ({"k": K[:63], "v": V[:63]}, "pages run from 3 to 3; expected 0 to 2"),
    ({"k": K[:0], "v": V[:0]}, "pages run from 3 to 3; expected 0 to -1"),
]


@both_ways
@pytest.mark.parametrize(("changes", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_arguments(move: Move, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
        call(move, **changes)
    assert "\n" not in str(error.value)


@both_ways
def test_other_devices_are_refused(move: Move) -> None:
    numbers = torch.zeros(1, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"^k is on device type 'meta'; expected 'cpu' or 'cuda'$"):
        call(move, table=numbers, pages=numbers, k=K.to("meta"), v=V.to("meta"))


@both_ways
def test_zero_blocks_move_nothing(move: Move) -> None:
    k, v = SHAPE.pool(4, seed=3)
    before = bytes_of(k), bytes_of(v)
    call(move, table=EMPTY, pages=EMPTY, k=k, v=v)
    assert (bytes_of(k), bytes_of(v)) == before


@both_ways
def test_zero_blocks_are_still_checked(move: Move) -> None:
    with pytest.raises(ValueError, match="layer is 9"):
        call(move, table=EMPTY, pages=EMPTY, layer=9)
