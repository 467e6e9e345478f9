"""How many extents each receiver is to hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """One receiver's part in the division."""

    wanted: int
    held: int


def fair_shares(extents: int, claims: Sequence[Claim]) -> list[int]:
    """Divide `extents` over `claims`, in their order: equal shares, no more than is wanted.

    What one does not want goes to the others. Extents that cannot be divided equally stay with
    those that hold the most, so that a division that is in place is not disturbed.
    """
    shares = [0] * len(claims)
    open_claims = [i for i, claim in enumerate(claims) if claim.wanted > 0]
    left = extents
    while open_claims and left >= len(open_claims):
        level = left // len(open_claims)
        for i in open_claims:
            more = min(level, claims[i].wanted - shares[i])
            shares[i] += more
            left -= more
        open_claims = [i for i in open_claims if shares[i] < claims[i].wanted]
    for i in sorted(open_claims, key=lambda i: claims[i].held, reverse=True)[:left]:
        shares[i] += 1
    return shares
