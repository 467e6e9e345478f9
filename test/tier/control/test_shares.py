"""How a donor divides its extents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swiftcache_tier.donor.shares import Claim, fair_shares

claims = st.lists(st.builds(Claim, st.integers(0, 50), st.integers(0, 50)), max_size=6)


@given(st.integers(0, 100), claims)
def test_nothing_is_given_twice_or_unasked(extents: int, claims: list[Claim]) -> None:
    shares = fair_shares(extents, claims)
    assert all(0 <= share <= claim.wanted for share, claim in zip(shares, claims, strict=True))
    assert sum(shares) == min(extents, sum(claim.wanted for claim in claims))


@given(st.integers(0, 100), claims)
def test_nobody_who_wants_more_has_less_than_another(extents: int, claims: list[Claim]) -> None:
    shares = fair_shares(extents, claims)
    for share, claim in zip(shares, claims, strict=True):
        if share < claim.wanted:
            assert share >= max(shares) - 1


@given(st.integers(0, 100), claims)
def test_a_division_in_place_is_not_disturbed(extents: int, claims: list[Claim]) -> None:
    shares = fair_shares(extents, claims)
    settled = [Claim(claim.wanted, share) for claim, share in zip(claims, shares, strict=True)]
    assert fair_shares(extents, settled) == shares


def test_the_odd_extent_stays_with_its_holder() -> None:
    assert fair_shares(5, [Claim(5, 2), Claim(5, 3)]) == [2, 3]
    assert fair_shares(5, [Claim(5, 3), Claim(5, 2)]) == [3, 2]
