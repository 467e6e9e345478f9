"""Counts of what the tier did for requests, for ``/server_info``. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TierStats:
    """Requests are counted once, on the first chunk of their prefill.

    ``hit_tokens`` and ``hits`` are by tier: tokens, and requests with at least one such token.
    ``lost_blocks`` is by cause: ``reclaimed`` (asked back and nowhere to go), ``donor_lost``.
    ``blocks_saved_by_copies`` were in memory that was asked back, lost or corrupt, and became one
    of their copies (``--swiftcache-replicas``). ``corrupt_blocks`` were not what had been stored,
    and became misses unless a copy was right (``verify``).
    """

    requests: int = 0
    hits: dict[str, int] = field(default_factory=lambda: {"device": 0, "donor": 0})
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "donor": 0})
    recomputed_tokens: int = 0
    moved_blocks: int = 0
    lost_blocks: int = 0
    corrupt_blocks: int = 0
    blocks_saved_by_copies: int = 0

    def count_requests(self, requests: Iterable[Any]) -> None:
        """``requests``: SGLang ``Req`` objects whose prefill batch has just been prepared."""
        for request in requests:
            if getattr(request, "swiftcache_counted", False):
                continue
            request.swiftcache_counted = True
            self.requests += 1
            device, donor = request.cached_tokens_device, request.cached_tokens_host
            for tier, tokens in (("device", device), ("donor", donor)):
                self.hits[tier] += tokens > 0
                self.hit_tokens[tier] += tokens
            self.recomputed_tokens += len(request.origin_input_ids) - device - donor

    def as_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "hits": dict(self.hits),
            "hit_tokens": dict(self.hit_tokens),
            "recomputed_tokens": self.recomputed_tokens,
            "moved_blocks": self.moved_blocks,
            "lost_blocks": self.lost_blocks,
            "corrupt_blocks": self.corrupt_blocks,
            "blocks_saved_by_copies": self.blocks_saved_by_copies,
        }
