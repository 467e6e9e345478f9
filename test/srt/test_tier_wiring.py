"""What the hooks of the tier decide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.swiftcache import tier_wiring

LOADING, NOTHING_TO_LOAD = 0, -1


def runner(*, donors: list[str] | None, consumer: int, full: bool) -> Any:
    pool = SimpleNamespace(
        streamer=None, layer_transfer_counter=SimpleNamespace(consumer_index=consumer)
    )
    server_args = SimpleNamespace(swiftcache_donors=donors)
    model_runner = SimpleNamespace(server_args=server_args, token_to_kv_pool=pool)
    return SimpleNamespace(model_runner=model_runner, _is_full_backend=full)


@pytest.mark.parametrize(
    ("donors", "consumer", "full", "graph"),
    [
        (["auto"], LOADING, True, False),
        (["auto"], LOADING, False, True),
        (["auto"], NOTHING_TO_LOAD, True, True),
        (None, LOADING, True, True),
    ],
    ids=["whole", "broken-at-attention", "nothing-to-load", "no-donors"],
)
def test_a_graph_of_the_whole_forward_reads_nothing_that_is_being_loaded(
    donors: list[str] | None, consumer: int, full: bool, graph: bool
) -> None:
    asked = runner(donors=donors, consumer=consumer, full=full)
    assert tier_wiring.can_run_prefill_graph(lambda *_: True, asked, "batch") is graph
    assert tier_wiring.can_run_prefill_graph(lambda *_: False, asked, "batch") is False
