"""``StreamAllocator``: SGLang's paged allocator with page ids chosen on the host, in two kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from sglang.srt.swiftcache.layer_stream.admission import streams
from sglang.srt.swiftcache.layer_stream.pool import StreamKVPool
from sglang.srt.swiftcache.layer_stream.rows import PageRows, pages_of, with_pages
from swiftcache_tier.stream import PageBook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class StreamAllocator(PagedTokenToKVPoolAllocator):
    """Hands out regular pages first, window pages only where they do not suffice.

    Before a window page is handed out, ``make_regular_room`` may evict what is cold. Requests that
    stream leave ``kept_pages`` regular ones to those that do not, unless there is no other page.
    Which slots the tokens get within the pages is still SGLang's computation, which finds the
    chosen pages in ``free_pages``. Scheduler thread only.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: StreamKVPool,
        need_sort: bool,
        req_to_token: torch.Tensor,
    ) -> None:
        window_pages = kvcache.window_tokens // page_size
        self.book = PageBook(kvcache.regular_tokens // page_size, window_pages)
        self.rows = PageRows(req_to_token, page_size)
        self.make_regular_room: Callable[[int], None] = lambda pages: None
        self.kept_pages = 0
        self.host_reads = 0
        """Frees of slots whose pages had to be read back from the device; 0 in normal service."""
        self._regular_only = False
        self._streams = np.empty(0, dtype=bool)  # of the requests that get slots
        self._chosen = np.empty(0, dtype=np.int64)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    def available_size(self) -> int:
        return (self.book.free_regular + self.book.free_window) * self.page_size

    @contextmanager
    def regular_only(self) -> Iterator[None]:
        """Inside, `alloc` hands out regular pages or nothing."""
        self._regular_only = True
        try:
            yield
        finally:
            self._regular_only = False

    @contextmanager
    def slots_for(self, requests: Sequence[Req]) -> Iterator[None]:
        """Inside, slots are handed out to these requests, in this order."""
        self._streams = np.array([streams(req) for req in requests], dtype=bool)
        try:
            yield
        finally:
            self._streams = np.empty(0, dtype=bool)

    @property
    def kept_now(self) -> int:
        """Regular pages that those leave alone who get slots now."""
        return self.kept_pages if self._streams.any() else 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole pages, int64 [need_size] on the device, with their pages noted."""
        pages = self._choose(np.array([need_size // self.page_size]), np.zeros(1, dtype=bool))
        return None if pages is None else self.slots_of(pages)

    def slots_of(self, pages: np.ndarray) -> torch.Tensor:
        """All slots of these pages, int64 on the device, with the pages noted."""
        first = self._upload(pages).unsqueeze(1) * self.page_size
        offsets = torch.arange(self.page_size, device=self.device)
        return with_pages((first + offsets).view(-1), pages)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        ends, starts = self._pages_for(seq_lens_cpu), self._pages_for(prefix_lens_cpu)
        if not self._prepare(ends - starts):
            return None
        return super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            len(self._chosen),
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if not self._prepare((seq_lens_cpu.numpy() % self.page_size == 1).astype(np.int64)):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def note_extend(self, row_ids: list[int], prefix_lens: list[int], seq_lens: list[int]) -> None:
        """Enter the pages that the last `alloc_extend` chose into the rows of its requests."""
        at = 0
        for row, prefix_len, seq_len in zip(row_ids, prefix_lens, seq_lens, strict=True):
            first, end = -(-prefix_len // self.page_size), -(-seq_len // self.page_size)
            self.rows.set(row, first, self._chosen[at : at + end - first])
            at += end - first

    def note_decode(self, row_ids: list[int], seq_lens: list[int]) -> None:
        """The same for `alloc_decode`; the lengths count the token that it was for."""
        at = 0
        for row, seq_len in zip(row_ids, seq_lens, strict=True):
            if seq_len % self.page_size == 1:
                self.rows.set(row, seq_len // self.page_size, self._chosen[at : at + 1])
                at += 1

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel():
            self._give_back(free_index)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if free_index.numel():
            self._give_back(free_index)

    def clear(self) -> None:
        """All pages are free; the window pages keep the homes they have."""
        self.book.clear(self.book.homes())
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self.free_page_reps_group: list[torch.Tensor] = []
        self.free_pages = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.release_pages = torch.empty(0, dtype=torch.int64, device=self.device)

    def _prepare(self, counts: np.ndarray) -> bool:
        chosen = self._choose(counts, self._streams)
        if chosen is None:
            return False
        self._chosen = chosen
        # never empty: the kernels are given its address
        self.free_pages = self._upload(chosen if chosen.size else np.zeros(1, dtype=np.int64))
        return True

    def _choose(self, counts: np.ndarray, streaming: np.ndarray) -> np.ndarray | None:
        """Page ids, or None if there are too few; then none was taken.

        counts: pages for each request, int64 (n,). streaming: which of them stream, bool (n,).
        """
        book = self.book
        last = np.repeat(streaming, counts)  # page by page: those that others come before
        pages, first = last.size, int(np.count_nonzero(~last))
        kept = self.kept_pages if first < pages else 0
        if book.free_regular < pages + kept:
            self.make_regular_room(pages + kept - book.free_regular)
        free = book.free_regular
        regular = min(pages, free, max(first, free - kept, pages - book.free_window))
        window = pages - regular
        if window > (0 if self._regular_only else book.free_window):
            return None
        order = np.argsort(last, kind="stable")
        chosen = np.empty(pages, dtype=np.int64)
        chosen[order[:regular]] = book.take_regular(regular)
        chosen[order[regular:]] = book.take_window(window)
        return chosen

    def _give_back(self, slots: torch.Tensor) -> None:
        pages = pages_of(slots)
        if pages is None:
            pages = self.rows.find(slots)
        if pages is None:
            self.host_reads += 1
            pages = torch.unique(slots // self.page_size).cpu().numpy()
        self.book.give_back(pages)

    def _pages_for(self, tokens: torch.Tensor) -> Any:
        return -(-tokens.numpy() // self.page_size)

    def _upload(self, pages: np.ndarray) -> torch.Tensor:
        on_host = torch.from_numpy(pages)
        if torch.device(self.device).type == "cpu":
            return on_host
        return on_host.pin_memory().to(self.device, non_blocking=True)
