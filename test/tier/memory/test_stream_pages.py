"""Pages of a pool with a window: nothing is handed out twice, every used window page has a home."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swiftcache_tier.stream import PageBook


def book_with_homes(regular: int, window: int, homes: int) -> PageBook:
    book = PageBook(regular, window)
    book.clear(np.arange(homes, dtype=np.int64) + 100)
    return book


def test_a_fresh_book_is_handed_out_in_order() -> None:
    book = book_with_homes(3, 4, 4)
    assert book.take_regular(2).tolist() == [1, 2]
    assert book.take_window(3).tolist() == [4, 5, 6]
    assert book.homes_of(np.array([4, 6])).tolist() == [100, 102]
    assert (book.free_regular, book.free_window, book.used_window) == (1, 1, 3)


def test_pages_without_a_home_are_retired_until_they_get_one() -> None:
    book = book_with_homes(1, 4, 2)
    assert (book.free_window, book.retired) == (2, 2)
    old = book.set_homes(book.retired_pages(), np.array([7, 8]))
    assert old.size == 0
    assert (book.free_window, book.retired) == (4, 0)


def test_more_than_there_is_raises_and_takes_nothing() -> None:
    book = book_with_homes(2, 2, 1)
    with pytest.raises(ValueError, match="3 pages are asked for, 2 are free"):
        book.take_regular(3)
    with pytest.raises(ValueError, match="2 pages are asked for, 1 are free"):
        book.take_window(2)
    book.check()


def test_giving_back_what_is_free_raises_and_changes_nothing() -> None:
    book = book_with_homes(2, 2, 2)
    pages = book.take_regular(1)
    for wrong in (np.array([2]), np.concatenate([pages, pages])):
        with pytest.raises(ValueError, match="free already, or given twice"):
            book.give_back(wrong)
    with pytest.raises(ValueError, match="cannot retire"):
        book.drop_homes(book.take_window(1))
    book.check([pages, np.array([3])])


class BookMachine(RuleBasedStateMachine):
    @initialize(regular=st.integers(1, 12), window=st.integers(1, 12), homes=st.integers(0, 12))
    def begin(self, regular: int, window: int, homes: int) -> None:
        self.book = book_with_homes(regular, window, min(window, homes))
        self.held: list[np.ndarray] = []
        self.next_block = 1000

    def blocks(self, count: int) -> np.ndarray:
        self.next_block += count
        return np.arange(self.next_block - count, self.next_block, dtype=np.int64)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        regular = data.draw(st.integers(0, self.book.free_regular))
        window = data.draw(st.integers(0, self.book.free_window))
        pages = np.concatenate([self.book.take_regular(regular), self.book.take_window(window)])
        if pages.size:
            self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self) -> None:
        self.book.give_back(self.held.pop(0))

    @precondition(lambda self: self.held)
    @rule()
    def renew(self) -> None:
        pages = self.held[0][self.book.is_window(self.held[0])]
        before = self.book.homes_of(pages)
        assert self.book.set_homes(pages, self.blocks(pages.size)).tolist() == before.tolist()

    @rule(count=st.integers(0, 5))
    def retire(self, count: int) -> None:
        pages = self.book.free_window_pages()[:count]
        assert self.book.drop_homes(pages).size == pages.size

    @rule(count=st.integers(0, 5))
    def house(self, count: int) -> None:
        pages = self.book.retired_pages()[:count]
        self.book.set_homes(pages, self.blocks(pages.size))

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "book"):
            return
        book = self.book
        book.check(self.held or [np.empty(0, dtype=np.int64)])
        window = book.free_window + book.used_window + book.retired
        assert window == book.window_pages
        for pages in self.held:
            mine = pages[book.is_window(pages)]
            assert (book.homes_of(mine) >= 0).all(), "a page in use without a home"


TestBookMachine = BookMachine.TestCase
TestBookMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
