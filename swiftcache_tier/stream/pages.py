"""Which pages of a KV pool with a window are free, and where the content of window pages lives.

Page 0 is the engine's padding. Pages 1 to `regular_pages` have memory of their own in every layer;
the `window_pages` after them share theirs, and what they hold lives in a block of donor memory, the
page's **home**. A window page has its home before it is handed out, so handing it out cannot fail
half-way; a page whose home was lost is retired until it gets another.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_HOME = -1


class PageBook:
    """Free lists of both kinds and the homes. Page ids are int64 arrays of shape (n,).

    One thread at a time. A breach of the contract raises ValueError and changes nothing.
    """

    def __init__(self, regular_pages: int, window_pages: int) -> None:
        self.regular_pages = regular_pages
        self.window_pages = window_pages
        self.first_window_page = 1 + regular_pages
        self._homes = np.full(window_pages, NO_HOME, dtype=np.int64)
        self._in_use = np.zeros(self.first_window_page + window_pages, dtype=bool)
        # Last in, first out; ascending at first, so that a fresh pool is handed out in order.
        self._regular = _Stack(np.arange(1, self.first_window_page))
        self._window = _Stack(np.empty(0, dtype=np.int64), capacity=window_pages)

    # -- what there is ------------------------------------------------------------------------

    @property
    def free_regular(self) -> int:
        return self._regular.size

    @property
    def free_window(self) -> int:
        return self._window.size

    @property
    def retired(self) -> int:
        """Window pages without a home, which nobody uses."""
        homeless = self._homes == NO_HOME
        return int(np.count_nonzero(homeless & ~self._in_use[self.first_window_page :]))

    @property
    def used_window(self) -> int:
        return int(np.count_nonzero(self._in_use[self.first_window_page :]))

    def is_window(self, pages: np.ndarray) -> np.ndarray:
        """bool (n,)."""
        return pages >= self.first_window_page

    def homes_of(self, pages: np.ndarray) -> np.ndarray:
        """The home of each of these window pages, int64 (n,)."""
        return self._homes[pages - self.first_window_page]

    def pages_with_homes_in(self, blocks: np.ndarray) -> np.ndarray:
        """Window pages whose home is one of `blocks`, ascending."""
        return np.flatnonzero(np.isin(self._homes, blocks)) + self.first_window_page

    def in_use(self, pages: np.ndarray) -> np.ndarray:
        """bool (n,)."""
        return self._in_use[pages]

    def retired_pages(self) -> np.ndarray:
        window = np.arange(self.first_window_page, self._in_use.size)
        return window[(self._homes == NO_HOME) & ~self._in_use[window]]

    def free_window_pages(self) -> np.ndarray:
        """Those that could be handed out, int64."""
        return self._window.items()

    def homes(self) -> np.ndarray:
        """All homes, int64."""
        return self._homes[self._homes != NO_HOME]

    # -- taking and giving --------------------------------------------------------------------

    def take_regular(self, pages: int) -> np.ndarray:
        return self._taken(self._regular.pop(pages))

    def take_window(self, pages: int) -> np.ndarray:
        return self._taken(self._window.pop(pages))

    def give_back(self, pages: np.ndarray) -> None:
        """Free pages of both kinds; a window page keeps its home, or retires without one.

        Raises ValueError if one is not in use or is given twice.
        """
        if np.unique(pages).size != pages.size or not self._in_use[pages].all():
            raise ValueError(f"pages {pages.tolist()}: one is free already, or given twice")
        self._in_use[pages] = False
        window = self.is_window(pages)
        self._regular.push(pages[~window])
        mine = pages[window]
        self._window.push(mine[self.homes_of(mine) != NO_HOME])

    def set_homes(self, pages: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Give window pages new homes. Returns the old ones, without those that had none.

        A retired page becomes free.
        """
        at = pages - self.first_window_page
        old = self._homes[at]
        self._homes[at] = blocks
        self._window.push(pages[(old == NO_HOME) & ~self._in_use[pages]])
        return old[old != NO_HOME]

    def drop_homes(self, pages: np.ndarray) -> np.ndarray:
        """Take the homes of window pages that are not in use: they retire. Returns the homes."""
        if self._in_use[pages].any():
            raise ValueError("a page in use cannot retire")
        at = pages - self.first_window_page
        old = self._homes[at]
        self._homes[at] = NO_HOME
        self._window.remove(pages)
        return old[old != NO_HOME]

    def clear(self, homes: np.ndarray) -> None:
        """All pages are free, and these blocks are the homes: of the first window pages."""
        self._in_use[:] = False
        self._homes[:] = NO_HOME
        self._homes[: homes.size] = homes
        self._regular = _Stack(np.arange(1, self.first_window_page))
        housed = np.arange(homes.size, dtype=np.int64) + self.first_window_page
        self._window = _Stack(housed, capacity=self.window_pages)

    def check(self, owners: Sequence[np.ndarray] = ()) -> None:
        """Recount; AssertionError if the books are off. `owners`: pages in use, by owner."""
        free = np.concatenate([self._regular.items(), self._window.items(), self.retired_pages()])
        used = np.flatnonzero(self._in_use)
        everything = np.sort(np.concatenate([free, used]))
        assert np.array_equal(everything, np.arange(1, self._in_use.size)), "a page is lost"
        homes = self.homes()
        assert np.unique(homes).size == homes.size, "a block is home of two pages"
        if owners:
            owned = np.sort(np.concatenate(list(owners)))
            assert np.array_equal(owned, used), "pages in use are not those of their owners"

    def _taken(self, pages: np.ndarray) -> np.ndarray:
        self._in_use[pages] = True
        return pages


class _Stack:
    """Page ids, last in, first out."""

    def __init__(self, ascending: np.ndarray, capacity: int | None = None) -> None:
        self._pages = np.empty(capacity or ascending.size, dtype=np.int64)
        self.size = 0
        self.push(ascending)

    def push(self, pages: np.ndarray) -> None:
        # reversed, so that an ascending run is handed out ascending
        self._pages[self.size : self.size + pages.size] = pages[::-1]
        self.size += pages.size

    def pop(self, n: int) -> np.ndarray:
        if n > self.size:
            raise ValueError(f"{n} pages are asked for, {self.size} are free")
        self.size -= n
        return self._pages[self.size : self.size + n][::-1].copy()

    def remove(self, pages: np.ndarray) -> None:
        kept = self.items()[~np.isin(self.items(), pages)]
        self._pages[: kept.size] = kept
        self.size = int(kept.size)

    def items(self) -> np.ndarray:
        return self._pages[: self.size].copy()
