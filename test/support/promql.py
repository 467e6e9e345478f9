"""Which metrics and labels a PromQL expression reads, by a real parser."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import promql_parser

# Of Grafana: ranges and variables, which its data source fills in.
_GRAFANA = {"$__rate_interval": "5m", "$instance": ".*"}


class Selector(NamedTuple):
    """One metric in an expression, with the labels that it is selected by."""

    metric: str
    labels: frozenset[str]


def selectors(expression: str) -> set[Selector]:
    """Every metric that ``expression`` reads. ValueError if it is no PromQL."""
    for variable, value in _GRAFANA.items():
        expression = expression.replace(variable, value)
    found: set[Selector] = set()
    _collect(promql_parser.parse(expression), found)
    return found


def sample_labels(metrics_text: str) -> dict[str, set[str]]:
    """Sample names of a ``/metrics`` answer, each with the names of its labels."""
    found: dict[str, set[str]] = {}
    for line in metrics_text.splitlines():
        match = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
        if match is not None:
            labels = re.findall(r'(\w+)="', match[2] or "")
            found.setdefault(match[1], set()).update(labels)
    return found


def _collect(node: Any, found: set[Selector]) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        assert node.name is not None, "select metrics by name"
        labels = frozenset(matcher.name for matcher in node.matchers.matchers)
        found.add(Selector(node.name, labels))
        return
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        part = getattr(node, name, None)
        if part is not None:
            _collect(part, found)
    for part in getattr(node, "args", None) or ():
        _collect(part, found)
