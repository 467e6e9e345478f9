"""The dashboard: one that Grafana can show, over metrics that there are."""

from __future__ import annotations

import itertools

from support.deployed import dashboard_expressions, panels
from support.promql import selectors


def test_every_expression_is_promql_on_our_metrics() -> None:
    assert len(dashboard_expressions()) > 30
    for expression in dashboard_expressions():
        found = selectors(expression)
        assert found, expression
        assert all(s.metric.startswith("swiftcache_") for s in found), expression


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(ids) == len(set(ids))
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels()], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
        assert one["x"] + one["w"] <= 24


def test_every_panel_asks_the_chosen_data_source() -> None:
    for panel in panels():
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"]
            assert panel["description"]
