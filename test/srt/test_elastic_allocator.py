"""Which pages an allocator hands out when some are lent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.elastic_tree import PAGE_TOKENS, ElasticTree

PAGES = 31  # and page 0: 4 extents of 8 pages


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticTree]:
    monkeypatch.setenv("SWIFTCACHE_EXTENT_BYTES", "4KiB")
    tree = ElasticTree(PAGES)
    yield tree
    tree.close()


def taken(tree: ElasticTree, pages: int) -> list[int]:
    tokens = tree.allocator.alloc(pages * PAGE_TOKENS)
    return (tokens[::PAGE_TOKENS] // PAGE_TOKENS).tolist()  # type: ignore[no-any-return]


def test_low_pages_are_handed_out_first_and_lent_ones_never(tree: ElasticTree) -> None:
    allocator = tree.allocator
    allocator.hold([3, 1])
    assert allocator.available_size() == (PAGES - 16) * PAGE_TOKENS
    assert taken(tree, 15) == [*range(1, 8), *range(16, 24)]
    allocator.release([1])
    allocator.release([3])
    assert taken(tree, 16) == [*range(8, 16), *range(24, 32)]


def test_an_extent_with_a_page_in_use_cannot_be_lent(tree: ElasticTree) -> None:
    allocator = tree.allocator
    tree.run(list(range(9 * PAGE_TOKENS)))
    with pytest.raises(ValueError, match="2 of 16 are not free"):
        allocator.hold([1, 2])
    assert allocator.held_tokens == 0
    tree.check()
    allocator.hold([2, 3])
    tree.check()


def test_a_flush_leaves_lent_pages_out(tree: ElasticTree) -> None:
    tree.allocator.hold([2])
    tree.allocator.clear()
    assert taken(tree, PAGES - 8) == [*range(1, 16), *range(24, 32)]
