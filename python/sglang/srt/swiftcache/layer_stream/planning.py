"""Which window pages a batch reads and writes, from what the host knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sglang.srt.swiftcache.layer_stream.rows import PageRows
from sglang.srt.swiftcache.layer_stream.streamer import ForwardPlan
from swiftcache_tier.stream import PageBook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang.srt.swiftcache.donor_kv_cache import DonorKVCache


def plan_forward(
    batch: ScheduleBatch, book: PageBook, rows: PageRows, pool: DonorKVCache
) -> ForwardPlan | None:
    """What the forward of a batch streams; None if no window page is concerned.

    The batch's slots have been allocated; its lengths count the new tokens.
    """
    if book.used_window == 0:
        return None
    seq_lens = batch.seq_lens_cpu.tolist()
    # the running part of a mixed batch counts as prefills of one token
    new_lens = [1] * len(seq_lens) if batch.forward_mode.is_decode() else batch.extend_lens
    held, written = [], []
    for req, end, new_len in zip(batch.reqs, seq_lens, new_lens, strict=True):
        of_request, start = rows.get(req.req_pool_idx, end), end - new_len
        held.append(of_request[: -(-start // pool.page_size)])
        written.append(of_request[start // pool.page_size :])
    pages = distinct_window_pages(held, book)
    new_pages = distinct_window_pages(written, book)
    if pages.size == 0 and new_pages.size == 0:
        return None
    homes, new_homes = book.homes_of(pages), book.homes_of(new_pages)
    # of a page that is partly new, what is written is counted whole
    pool.traffic.count("load", homes)
    pool.traffic.count("store", new_homes)
    addresses = pool.tier.addresses
    return ForwardPlan(
        pages,
        addresses(homes),
        new_pages,
        addresses(new_homes),
        np.concatenate([homes, new_homes]),
    )


def mark_pages(held: Iterable[np.ndarray], book: PageBook) -> np.ndarray:
    """Which pages are among these page ids: bool, by page."""
    # by marks, not by sorting: a step may name hundreds of thousands of pages
    marked = np.zeros(book.first_window_page + book.window_pages, dtype=bool)
    for pages in held:
        marked[pages] = True
    return marked


def distinct_window_pages(held: Iterable[np.ndarray], book: PageBook) -> np.ndarray:
    """The window pages among these page ids, each once, ascending: int64."""
    marked = mark_pages(held, book)
    return np.flatnonzero(marked[book.first_window_page :]) + book.first_window_page
