"""A short soak; `python -m soak` is an hour."""

from __future__ import annotations

import os
from typing import Any

import pytest

from soak.__main__ import main as soak
from soak.books import wrong_in_donor, wrong_in_server

SECONDS = os.environ.get("SOAK_SECONDS", "15")


@pytest.mark.timeout(7200)
def test_a_server_and_donors_that_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    done = soak(["--seconds", SECONDS, "--only-report-cost"])
    assert done == 0, "".join(capsys.readouterr())


def donor(**changes: Any) -> dict[str, Any]:
    return {
        "name": "ada",
        "state": "joined",
        "extent_bytes": 1000,
        "extents": {"free": 0, "lent": 4},
        "bytes": 4000,
        "blocks": {"total": 40},
    } | changes


def tier(*donors: dict[str, Any], found: int = 0, **blocks: int) -> dict[str, Any]:
    return {
        "block_bytes": 100,
        "audits": {"found": found, "violated": "a lock has no holder"},
        "donors": list(donors),
        "blocks": {"total": 40, "free": 30, "used": 9, "retiring": 1} | blocks,
    }


def test_books_that_add_up_are_passed() -> None:
    assert wrong_in_server(tier(donor())) == []
    assert wrong_in_donor({"free": 1, "lent": 3}, 4) == []


@pytest.mark.parametrize(
    "books",
    [
        tier(donor(), found=1),
        tier(donor(), free=29),
        tier(donor(), total=41, free=31),
        tier(donor(blocks={"total": 41}), total=41, free=31),
        tier(donor(blocks={"total": 39}), total=39, free=29),
        tier(donor(bytes=5000)),
    ],
)
def test_books_that_do_not_add_up_are_found(books: dict[str, Any]) -> None:
    assert wrong_in_server(books)


def test_extents_that_do_not_add_up_are_found() -> None:
    assert wrong_in_donor({"free": 1, "lent": 2, "orphaned": 0}, 4)
