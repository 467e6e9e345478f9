"""Counts of what the tier did for requests, for ``/server_info``. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

# Requests that are nobody's: SGLang's own probes, and its warm-up, which `ttft` marks.
WARM_UP_RID_PREFIX = "SWIFTCACHE_WARM_UP_"
_NOT_COUNTED = (HEALTH_CHECK_RID_PREFIX, WARM_UP_RID_PREFIX)

LOSS_CAUSES = ("reclaimed", "donor_lost")


@dataclass
class TierStats:
    """Requests are counted once, on the first chunk of their prefill; probes and warm-up are not.

    ``hit_tokens`` and ``hits`` are by tier: tokens, and requests with at least one such token.
    ``lost_by_cause`` counts blocks: ``reclaimed`` (asked back and nowhere to go), ``donor_lost``.
    ``blocks_saved_by_copies`` were in memory that was asked back, lost or corrupt, and became one
    of their copies (``--swiftcache-replicas``). ``corrupt_blocks`` were not what had been stored,
    and became misses unless a copy was right (``verify``). ``expired_tokens`` were forgotten by
    ``--swiftcache-ttl``. ``cold_copy_tokens`` were stored when they had become cold, in a tier with
    no room for copies of all that is on the device, and ``forgotten_copy_tokens`` made room there.
    """

    requests: int = 0
    hits: dict[str, int] = field(default_factory=lambda: {"device": 0, "donor": 0})
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"device": 0, "donor": 0})
    recomputed_tokens: int = 0
    moved_blocks: int = 0
    lost_by_cause: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSS_CAUSES, 0))
    expired_tokens: int = 0
    corrupt_blocks: int = 0
    blocks_saved_by_copies: int = 0
    cold_copy_tokens: int = 0
    forgotten_copy_tokens: int = 0

    @property
    def lost_blocks(self) -> int:
        return sum(self.lost_by_cause.values())

    def count_requests(self, requests: Iterable[Any]) -> None:
        """``requests``: SGLang ``Req`` objects whose prefill batch has just been prepared."""
        for request in requests:
            if getattr(request, "swiftcache_counted", False):
                continue
            if str(request.rid).startswith(_NOT_COUNTED):
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
            "lost_blocks_by_cause": dict(self.lost_by_cause),
            "expired_tokens": self.expired_tokens,
            "corrupt_blocks": self.corrupt_blocks,
            "blocks_saved_by_copies": self.blocks_saved_by_copies,
            "cold_copy_tokens": self.cold_copy_tokens,
            "forgotten_copy_tokens": self.forgotten_copy_tokens,
        }
