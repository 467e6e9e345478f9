"""The rules for Prometheus: well formed, and they say what they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from support.deployed import DEPLOY, RULES, rules
from support.promql import selectors
from swiftcache_tier.donor.water import WaterMarks

OPERATIONS = DEPLOY.parent / "docs" / "operations.md"
PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")


def test_the_file_has_the_form_that_prometheus_wants() -> None:
    records, alerts = rules()
    names = [rule.record for rule in records] + [rule.alert for rule in alerts]
    assert len(names) == len(set(names))
    assert all(rule.labels["severity"] in ("warning", "critical") for rule in alerts)


def test_every_expression_is_promql_on_our_metrics() -> None:
    records, alerts = rules()
    for rule in [*records, *alerts]:
        found = selectors(rule.expr)
        assert found
        assert all(s.metric.startswith(("swiftcache_", "swiftcache:")) for s in found)
    recorded = {rule.record for rule in records}
    used = {s.metric for rule in alerts for s in selectors(rule.expr) if ":" in s.metric}
    assert used <= recorded


def test_what_operators_asked_for_is_watched() -> None:
    _, alerts = rules()
    expressions = {rule.alert: rule.expr for rule in alerts}
    assert expressions["SwiftCacheTtftHigh"].endswith("> 5")
    (ratio,) = re.findall(r"ratio\[10m\]\) > ([\d.]+)", expressions["SwiftCacheDonatedRatioHigh"])
    assert float(ratio) < 1 - WaterMarks().high, "no more is lent by default"
    assert "take_backs_total[10m]) > 3" in expressions["SwiftCacheDonatedRatioHigh"]
    assert expressions["SwiftCacheNvlinkBusy"].endswith("> 0.9")
    assert "< 0.5" in expressions["SwiftCacheHitRateLow"]
    assert 'state="orphaned"' in expressions["SwiftCacheOrphans"]
    assert 'state="degraded"' in expressions["SwiftCacheDegraded"]


def test_the_guide_says_what_to_do_for_each_alert() -> None:
    headings = set(re.findall(r"^### (\w+)$", OPERATIONS.read_text(), re.M))
    assert {rule.alert for rule in rules()[1]} == {
        h for h in headings if h.startswith("SwiftCache")
    }


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, on PATH or named by PROMTOOL")
def test_promtool_finds_that_alerts_fire_when_they_should() -> None:
    assert PROMTOOL is not None
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        result = subprocess.run(
            [PROMTOOL, *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stdout + result.stderr
