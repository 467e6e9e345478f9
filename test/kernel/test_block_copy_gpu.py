"""Whole blocks from donor memory to donor memory, by a GPU that reaches both."""

from __future__ import annotations

import pytest
import torch
from kernel.cases import bytes_of
from kernel.gpu_cases import GPU, PLACES, donor_memory, needs_gpu, on_gpu

from swiftcache_kernel import copy_blocks

pytestmark = needs_gpu


@pytest.mark.parametrize("block_bytes", [16, 24, 40_002, 16384, 5 * 16384 + 48, 2304 << 10])
@pytest.mark.parametrize("to_place", PLACES)
@pytest.mark.parametrize("from_place", PLACES)
def test_any_blocks_to_any_others(from_place: str, to_place: str, block_bytes: int) -> None:
    blocks = 7
    source = donor_memory(blocks * block_bytes, from_place, seed=1)
    target = donor_memory(blocks * block_bytes, to_place, seed=2)
    sent, kept = bytes_of(source), bytes_of(target)
    moves = {0: 5, 1: 0, 2: 5, 6: 3}  # to: from
    copy_blocks(
        on_gpu([source.data_ptr() + row * block_bytes for row in moves.values()]),
        on_gpu([target.data_ptr() + row * block_bytes for row in moves]),
        block_bytes=block_bytes,
    )
    torch.cuda.synchronize()
    rows = [(sent, moves[row]) if row in moves else (kept, row) for row in range(blocks)]
    expected = b"".join(data[row * block_bytes : (row + 1) * block_bytes] for data, row in rows)
    assert bytes_of(target) == expected
    assert bytes_of(source) == sent


def test_many_blocks() -> None:
    block_bytes, blocks = 72 << 10, 1000
    memory = torch.randint(0, 256, (2 * blocks, block_bytes), dtype=torch.uint8, device=GPU)
    first = torch.arange(blocks, device=GPU)
    shuffled = torch.randperm(blocks, device=GPU)
    expected = memory[:blocks][shuffled]
    copy_blocks(
        memory.data_ptr() + shuffled * block_bytes,
        memory.data_ptr() + (first + blocks) * block_bytes,
        block_bytes=block_bytes,
    )
    torch.cuda.synchronize()
    assert torch.equal(memory[blocks:], expected)


def test_the_copy_runs_on_the_current_stream() -> None:
    memory = torch.zeros(2, 1 << 20, dtype=torch.uint8, device=GPU)
    source, target = (on_gpu([memory[row].data_ptr()]) for row in range(2))
    copy_blocks(source, target, block_bytes=1 << 20)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        memory[0].fill_(1)
        copy_blocks(source, target, block_bytes=1 << 20)
    stream.synchronize()
    assert set(bytes_of(memory[1])) == {1}
