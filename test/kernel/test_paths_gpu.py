"""The table of paths as it is measured on a GPU. What the times are is not tested."""

from __future__ import annotations

import pytest
import torch
from kernel.cases import Shape, bytes_of
from kernel.gpu_cases import PLACES, donor_memory, gpu_pool, needs_gpu

from swiftcache_kernel.measure import BLOCKS, GRIDS, SCATTERED_BLOCKS, measure_paths

pytestmark = needs_gpu

SHAPE = Shape(torch.bfloat16, page_tokens=16, layers=2, heads=2, k_dim=64, v_dim=64)


@pytest.mark.parametrize("place", PLACES)
def test_every_path_is_timed(place: str) -> None:
    room = max(BLOCKS)
    memory = donor_memory(room * SHAPE.layout.block_bytes + 7, place)
    before = bytes_of(memory)
    pool = gpu_pool(SHAPE, room, seed=1)
    table = measure_paths(memory.data_ptr(), memory.nbytes, pool)
    assert bytes_of(memory) == before
    assert table.layer_bytes == SHAPE.layout.layer_bytes
    assert tuple(times.programs for times in table.kernel) == GRIDS
    assert table.copies is not None
    sizes = [[blocks for blocks, _ in times.samples] for times in table.kernel]
    sizes.append([blocks for blocks, _ in table.copies.one_run])
    assert sizes == [list(BLOCKS)] * (len(GRIDS) + 1)
    assert [blocks for blocks, _ in table.copies.scattered] == list(SCATTERED_BLOCKS)
    assert table.choose(room, None, table.layer_bytes, compute_running=False).programs in GRIDS
    assert "measured on cuda:0" in str(table)


def test_a_small_region_is_timed_with_what_it_holds() -> None:
    memory = donor_memory(100 * SHAPE.layout.block_bytes, "cuda:0")
    table = measure_paths(memory.data_ptr(), memory.nbytes, gpu_pool(SHAPE, 80, seed=2))
    assert [[blocks for blocks, _ in times.samples] for times in table.kernel] == [[64]] * 4
    few = measure_paths(memory.data_ptr(), memory.nbytes, gpu_pool(SHAPE, 5, seed=3))
    assert [blocks for blocks, _ in few.kernel[0].samples] == [5]


def test_no_room_is_an_error() -> None:
    memory = donor_memory(SHAPE.layout.block_bytes, "cuda:0")
    with pytest.raises(ValueError, match="expected room for one"):
        measure_paths(memory.data_ptr(), memory.nbytes - 1, gpu_pool(SHAPE, 5, seed=4))
