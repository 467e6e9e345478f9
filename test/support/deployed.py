"""What lies in deploy/: the rules for Prometheus and the dashboard for Grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "swiftcache.json"

Duration = Annotated[str, Meta(pattern=r"\A\d+(ms|s|m|h|d)\Z")]
Name = Annotated[str, Meta(pattern=r"\A[a-zA-Z_:][a-zA-Z0-9_:]*\Z")]


class Record(Struct, forbid_unknown_fields=True):
    record: Name
    expr: str


class Annotations(Struct, forbid_unknown_fields=True):
    summary: str
    description: str


class Alert(Struct, forbid_unknown_fields=True, rename={"hold": "for"}):
    alert: Name
    expr: str
    labels: dict[str, str]
    annotations: Annotations
    hold: Duration | None = None


class Group(Struct, forbid_unknown_fields=True):
    name: str
    rules: list[dict[str, object]]
    interval: Duration | None = None


class Rules(Struct, forbid_unknown_fields=True):
    groups: list[Group]


def rules() -> tuple[list[Record], list[Alert]]:
    found = [
        rule
        for group in msgspec.yaml.decode(RULES.read_bytes(), type=Rules).groups
        for rule in group.rules
    ]
    records = [msgspec.convert(rule, Record) for rule in found if "record" in rule]
    alerts = [msgspec.convert(rule, Alert) for rule in found if "record" not in rule]
    return records, alerts


def panels() -> list[dict[str, Any]]:
    """Of the dashboard, rows included."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def adapter_rules() -> list[dict[str, Any]]:
    """Of prometheus-adapter."""
    file = DEPLOY / "kubernetes" / "prometheus-adapter.yaml"
    config = msgspec.yaml.decode(file.read_bytes(), type=dict[str, Any])["data"]["config.yaml"]
    found: list[dict[str, Any]] = msgspec.yaml.decode(config)["rules"]
    return found


def adapter_expressions() -> list[str]:
    """Of the adapter's rules, with its templates filled in."""
    filled = {"<<.GroupBy>>": "pod", "<<.LabelMatchers>>": 'namespace="n",pod=~"a|b"'}
    found = [rule[key] for rule in adapter_rules() for key in ("seriesQuery", "metricsQuery")]
    for template, value in filled.items():
        found = [expression.replace(template, value) for expression in found]
    return found
