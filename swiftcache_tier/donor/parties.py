"""Those a lender deals with: receivers, the ways to them, the engine whose memory it lends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swiftcache_tier.control.messages import ToReceiver
from swiftcache_tier.lease import Grant

SHARING = "another receiver asks for its share"


class Port(Protocol):
    """The way to one receiver. No call blocks, and what is sent may be lost."""

    def offer(self, grant: Grant) -> None:
        """Hand descriptors over, as long as `grant` is still offered when its turn comes."""

    def tell(self, message: ToReceiver) -> None:
        """Send a control message."""

    def close(self) -> None:
        """The session is over."""


class Engine(Protocol):
    """A serving engine whose own memory the donor lends."""

    def take_returned(self, slots: list[int]) -> None:
        """These extents are the engine's own again. What is in them is anybody's."""


@dataclass(eq=False)
class Receiver:
    """One receiver that has a session."""

    token: str
    name: str
    pid: int
    uid: int
    port: Port
    heard_s: float
    wanted: int = 0
    link: str | None = None
    """How it says it reaches the memory."""
    gb_per_s: float | None = None
    target: int = 0
    silent: bool = False
    door_open: bool = True
    """Descriptors can still be handed over."""
    no_offer_before_s: float = 0.0
    reclaim_reason: str = SHARING
    reclaim_sent_s: float = 0.0

    def __str__(self) -> str:
        return f"receiver {self.name} (process {self.pid})"
