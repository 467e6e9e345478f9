"""Every model of the table lends to every other, and the documented table is the real one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from swiftcache_tier.models import KNOWN_MODELS, NamedModel
from swiftcache_tier.planning.pairs import LEASE_BYTES, pair, pair_tables
from swiftcache_tier.settings import Settings

WANTED = Settings().extent_bytes
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "extents.md"


def test_a_lease_of_1_gib_wastes_no_more_than_one_percent_whatever_the_pair() -> None:
    for receiver, donor in product(KNOWN_MODELS, repeat=2):
        fit = pair(KNOWN_MODELS[receiver].kv, KNOWN_MODELS[donor].kv, WANTED)
        assert fit.lease.lease_bytes >= LEASE_BYTES
        assert fit.lease.waste <= 0.01, f"{receiver} on {donor}"
        assert fit.extent.pages is not None, f"pages of {donor} straddle its extents"


def test_the_documented_tables_are_those_of_the_code() -> None:
    models = [NamedModel(name, *model) for name, model in KNOWN_MODELS.items()]
    tables = pair_tables(models, WANTED)
    what_to_do = f"write what `swiftcache plan --pairs` prints into {DOCUMENT.name}"
    assert tables in DOCUMENT.read_text(), what_to_do
