"""The pages of slots, known on the host.

SGLang names slots by tensors on the device. Reading one back would wait for the forward in flight,
so page ids are chosen on the host and kept there beside the tensors: for the rows of the request
table in `PageRows`, for the values of tree nodes on the tensor itself.
"""

from __future__ import annotations

import numpy as np
import torch

_PAGES = "swiftcache_pages"


def with_pages(value: torch.Tensor, pages: np.ndarray) -> torch.Tensor:
    """``value``, slots of whole pages, from now on with their pages: int64 [len(value) / page]."""
    setattr(value, _PAGES, pages)
    return value


def pages_of(value: torch.Tensor | None) -> np.ndarray | None:
    """The pages that `with_pages` noted; None for another tensor, such as a copy or a slice."""
    return getattr(value, _PAGES, None)


def known_pages(value: torch.Tensor | None) -> np.ndarray:
    """The pages of a tensor for which they have been noted. AssertionError for any other."""
    pages = pages_of(value)
    assert pages is not None, "slots whose pages were not noted"
    return pages


class PageRows:
    """The pages of every request, by its row of SGLang's request table. Scheduler thread only."""

    def __init__(self, req_to_token: torch.Tensor, page_size: int) -> None:
        """req_to_token: int32 [rows, tokens], SGLang's table; its content is not read."""
        rows, tokens = req_to_token.shape
        self._page_size = page_size
        self._row_items = req_to_token.stride(0)
        self._table = req_to_token
        # Untouched pages of this array take no memory.
        self._pages = np.zeros((rows, -(-tokens // page_size)), dtype=np.int32)

    def set(self, row: int, first: int, pages: np.ndarray) -> None:
        """The pages at places ``first`` and on of a request."""
        self._pages[row, first : first + len(pages)] = pages

    def get(self, row: int, tokens: int) -> np.ndarray:
        """The pages of a request's first ``tokens`` tokens, int64."""
        return self._pages[row, : -(-tokens // self._page_size)].astype(np.int64)

    def find(self, slots: torch.Tensor) -> np.ndarray | None:
        """The pages of a slice of one request's row; None for what is no such slice."""
        if slots.untyped_storage().data_ptr() != self._table.untyped_storage().data_ptr():
            return None
        if slots.stride() != (1,):
            return None
        row, column = divmod(int(slots.storage_offset()), self._row_items)
        end = column + len(slots)
        first, last = column // self._page_size, -(-end // self._page_size)
        return self._pages[row, first:last].astype(np.int64)
