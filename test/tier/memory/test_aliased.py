"""Buffers that share their last part with every other layer."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from swiftcache_tier.extents.aliased import AliasedBuffers, BufferSize, unit_tokens

PAGE = mmap.PAGESIZE
LAYERS = 5


@pytest.fixture
def buffers() -> AliasedBuffers:
    return AliasedBuffers("cpu", LAYERS, BufferSize(2 * PAGE, PAGE), BufferSize(PAGE, 3 * PAGE))


def write(buffers: AliasedBuffers, side: int, layer: int, at: int, byte: int) -> None:
    ctypes.memset(buffers.address(side, layer) + at, byte, 1)


def read(buffers: AliasedBuffers, side: int, layer: int, at: int) -> int:
    return ctypes.string_at(buffers.address(side, layer) + at, 1)[0]


def test_own_memory_is_a_layers_own(buffers: AliasedBuffers) -> None:
    for layer in range(LAYERS):
        write(buffers, 0, layer, 2 * PAGE - 1, 1 + layer)
        write(buffers, 1, layer, PAGE - 1, 101 + layer)
    for layer in range(LAYERS):
        assert read(buffers, 0, layer, 2 * PAGE - 1) == 1 + layer
        assert read(buffers, 1, layer, PAGE - 1) == 101 + layer


def test_the_window_is_shared_by_every_other_layer(buffers: AliasedBuffers) -> None:
    for side, own in ((0, 2 * PAGE), (1, PAGE)):
        assert all(read(buffers, side, layer, own) == 0 for layer in range(LAYERS))
        write(buffers, side, 0, own, 7)
        write(buffers, side, 3, own, 9)
        assert [read(buffers, side, layer, own) for layer in range(LAYERS)] == [7, 9, 7, 9, 7]


def test_keys_and_values_share_nothing(buffers: AliasedBuffers) -> None:
    write(buffers, 0, 0, 2 * PAGE, 5)
    assert read(buffers, 1, 0, PAGE) == 0


def test_close_may_be_repeated(buffers: AliasedBuffers) -> None:
    buffers.close()
    buffers.close()


@pytest.mark.parametrize(
    ("page", "rows", "expected"),
    [(16, (128, 128), 32), (64, (128, 128), 64), (16, (4096, 4096), 16), (16, (96, 128), 128)],
)
def test_units_fill_whole_pages_of_memory(page: int, rows: tuple[int, int], expected: int) -> None:
    unit = unit_tokens("cpu", page, rows)
    assert unit == expected
    assert unit % page == 0
    assert all(unit * row % PAGE == 0 for row in rows)
