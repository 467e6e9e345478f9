"""Blocks to and from a pool whose pages have the bytes of a block."""

from __future__ import annotations

import pytest
import torch

from swiftcache_kernel import BlockLayout
from swiftcache_kernel.page_major import PageMajorBuffers, PageMajorTransfer

LAYOUT = BlockLayout(layers=3, page_tokens=4, k_token_bytes=16, v_token_bytes=8)


def random_bytes(rows: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, LAYOUT.block_bytes), dtype=torch.uint8)


def table_of(blocks: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return torch.tensor([blocks.data_ptr() + i * LAYOUT.block_bytes for i in ids])


def test_layer_by_layer_a_page_becomes_the_block() -> None:
    blocks, raw = random_bytes(5), random_bytes(6)
    before = raw.clone()
    transfer = PageMajorTransfer(
        table_of(blocks, [4, 0]), torch.tensor([1, 3]), PageMajorBuffers(LAYOUT, raw)
    )
    for layer in range(LAYOUT.layers):
        transfer.gather(layer)
        end = LAYOUT.layer_bytes * (layer + 1)
        assert torch.equal(raw[1, :end], blocks[4, :end])
        assert torch.equal(raw[1, end:], before[1, end:])
    assert torch.equal(raw[3], blocks[0])
    for page in (0, 2, 4, 5):
        assert torch.equal(raw[page], before[page])


@pytest.mark.parametrize("at_once", [True, False])
def test_pages_are_stored_to_blocks(at_once: bool) -> None:
    blocks, raw = random_bytes(5), random_bytes(6)
    before = blocks.clone()
    transfer = PageMajorTransfer(
        table_of(blocks, [2, 3]), torch.tensor([5, 0]), PageMajorBuffers(LAYOUT, raw)
    )
    if at_once:
        transfer.scatter_all()
    else:
        for layer in range(LAYOUT.layers):
            transfer.scatter(layer)
    assert torch.equal(blocks[2], raw[5])
    assert torch.equal(blocks[3], raw[0])
    assert torch.equal(blocks[[0, 1, 4]], before[[0, 1, 4]])


def test_what_breaks_the_contract_is_refused() -> None:
    blocks, raw = random_bytes(2), random_bytes(2)
    with pytest.raises(ValueError, match="expected uint8 bytes"):
        PageMajorBuffers(LAYOUT, raw[:, :-1])
    with pytest.raises(ValueError, match="back to back"):
        PageMajorBuffers(LAYOUT, raw.repeat(1, 2)[:, : LAYOUT.block_bytes])
    with pytest.raises(ValueError, match="expected 0 to 1"):
        PageMajorTransfer(table_of(blocks, [0]), torch.tensor([2]), PageMajorBuffers(LAYOUT, raw))
    transfer = PageMajorTransfer(
        table_of(blocks, [0]), torch.tensor([1]), PageMajorBuffers(LAYOUT, raw)
    )
    with pytest.raises(ValueError, match="layer is 3"):
        transfer.gather(3)


def test_nothing_to_move_is_no_error() -> None:
    none = torch.empty(0, dtype=torch.int64)
    transfer = PageMajorTransfer(none, none, PageMajorBuffers(LAYOUT, random_bytes(1)))
    transfer.gather(0)
    transfer.scatter_all()
