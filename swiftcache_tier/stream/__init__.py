"""The layer window: how large it is to be, and which page of it is whose. No device memory."""

from __future__ import annotations

from swiftcache_tier.stream.pages import PageBook
from swiftcache_tier.stream.sizing import (
    StreamPlan,
    StreamShape,
    donor_blocks,
    plan_auto,
    plan_window,
    regular_tokens_for,
    window_limit_tokens,
)

__all__ = [
    "PageBook",
    "StreamPlan",
    "StreamShape",
    "donor_blocks",
    "plan_auto",
    "plan_window",
    "regular_tokens_for",
    "window_limit_tokens",
]
