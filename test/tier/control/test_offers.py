"""How a donor offers its extents: a part at a time."""

from __future__ import annotations

import pytest

from swiftcache_tier.control.messages import Accept, Decline, Ping, ToReceiver
from swiftcache_tier.donor.lender import Lender, Receiver
from swiftcache_tier.lease import Grant, LeaseState
from swiftcache_tier.settings import Settings

TOKEN = "one"


class Port:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.grants: list[Grant] = []

    def offer(self, grant: Grant) -> None:
        self.grants.append(grant)

    def tell(self, message: ToReceiver) -> None:
        pass

    def close(self) -> None:
        pass


def lender_and_port(extent_bytes: int, settings: Settings) -> tuple[Lender, Port]:
    lender, port = Lender(100, extent_bytes, settings, lambda: None), Port()
    lender.join(Receiver(TOKEN, "receiver", pid=1, uid=0, port=port, heard_s=0.0))
    lender.hear(Ping(TOKEN, wanted=100), 0.0)
    return lender, port


@pytest.mark.parametrize(
    ("extent_bytes", "at_once"), [(1 << 20, 30), (16 << 20, 4), (1 << 30, 1), (1 << 40, 1)]
)
def test_a_part_is_limited_in_extents_and_in_bytes(extent_bytes: int, at_once: int) -> None:
    settings = Settings(extents_per_message=30, offer_bytes_max=64 << 20)
    _, port = lender_and_port(extent_bytes, settings)
    assert [len(grant.slots) for grant in port.grants] == [at_once]


def test_the_next_part_follows_when_the_last_is_answered() -> None:
    lender, port = lender_and_port(1 << 20, Settings(extents_per_message=40))
    first = port.grants[0]
    lender.hear(Ping(TOKEN, wanted=100), 0.1)
    lender.hear(Accept(TOKEN, first.number, list(first.slots[:39])), 0.2)
    assert port.grants == [first], "one extent of it is not answered yet"
    lender.hear(Accept(TOKEN, first.number, list(first.slots[39:])), 0.3)
    assert len(port.grants) == 2
    while lender.table.counts()[LeaseState.OFFERED]:
        grant = port.grants[-1]
        lender.hear(Accept(TOKEN, grant.number, list(grant.slots)), 0.4)
    assert [len(grant.slots) for grant in port.grants] == [40, 40, 20]
    assert lender.table.counts()[LeaseState.LENT] == 100


def test_what_was_declined_is_offered_again_later() -> None:
    settings = Settings(extents_per_message=40, offer_timeout_s=5.0)
    lender, port = lender_and_port(1 << 20, settings)
    first = port.grants[0]
    lender.hear(Accept(TOKEN, first.number, list(first.slots[:10])), 0.1)
    lender.hear(Decline(TOKEN, first.number, list(first.slots[10:])), 0.2)
    lender.scrubbed(sorted(lender.table.dirty), 0.3)
    assert len(port.grants) == 1
    lender.hear(Ping(TOKEN, wanted=100), 6.0)
    assert len(port.grants) == 2
