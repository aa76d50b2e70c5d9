"""docs/metrics.md, the dashboard and the alert rules name exactly what is exported, and commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs import metrics_table
from tests.docs.test_examples import wrong_with

from perdure.metrics import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
RULES = [rule for group in yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"instance", "job"}  # labels that Prometheus adds to each sample
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
EXPORTED = {f"{family.name}{ending}": family for family in FAMILIES for ending in ENDINGS[family.kind]}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if isinstance(variable["query"], dict):
            yield variable["query"]["query"].replace("label_values(", "(")
    yield from (rule["expr"] for rule in RULES)


def unknown_in(expression: str) -> list[str]:
    """The metrics and labels in it that are not exported, and functions that do not fit the kind of a metric."""
    wrong: list[str] = []
    known = set(OF_PROMETHEUS)
    for name, selector in re.findall(r"\b(perdure_\w+)(?:\{([^}]*)\})?", expression):
        family = EXPORTED.get(name)
        if family is None:
            wrong.append(name)
            continue
        labels = {*family.labels, *OF_PROMETHEUS, *(["le"] if name.endswith("_bucket") else [])}
        known |= labels
        wrong += [f"{name}{{{label}}}" for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector) if label not in labels]
        if (family.kind == "gauge") == bool(re.search(rf"(rate|increase)\({name}\b", expression)):
            wrong.append(f"{name} is a {family.kind}")
    wrong += [label for some in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", some) if label not in known]
    return wrong


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_metric_and_label_of_the_dashboard_and_the_alerts_is_exported(expression: str) -> None:
    assert unknown_in(expression) == []


@pytest.mark.parametrize(
    "expression",
    [
        "sum(perdure_no_such_thing)",
        'perdure_runs{tenant="x"}',
        "sum by (model) (perdure_runs)",
        "rate(perdure_runs[5m])",
        "sum(perdure_claims_total)",
        "perdure_commit_seconds",
    ],
)
def test_a_wrong_expression_is_noticed(expression: str) -> None:
    assert unknown_in(expression) != []


def test_the_dashboard_and_the_alerts_use_every_metric() -> None:
    used = {name for expression in expressions() for name in re.findall(r"perdure_\w+", expression)}
    assert [family.name for family in FAMILIES if not any(f"{family.name}{end}" in used for end in ENDINGS[family.kind])] == []


def test_the_table_of_the_page_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert metrics_table.table() in text, "python -m tests.docs.metrics_table"


def commands() -> list[str]:
    """Every command that an alert or a panel names."""
    texts = [rule["annotations"]["do"] for rule in RULES]
    told = [command for text in texts for command in re.findall(r"`(perdure [^`]+)`", text)]
    shown = [found for panel in DASHBOARD["panels"] for found in re.findall(r"perdure [a-z][^,:]*", panel.get("description", ""))]
    return sorted({*told, *shown})


@pytest.mark.parametrize("command", commands())
def test_every_command_that_they_name_exists(command: str) -> None:
    assert wrong_with(shlex.split(command)[1:]) is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_wrong_and_which_command_to_type(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert "`perdure " in rule["annotations"]["do"]
    grouped = {*OF_PROMETHEUS, *re.split(r",\s*", ",".join(re.findall(r"\bby \(([^)]*)\)", rule["expr"])))}
    told = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert [label for label in told if label not in grouped] == []


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y) for panel in DASHBOARD["panels"] for x in range(panel["gridPos"]["w"]) for y in range(panel["gridPos"]["h"])]  # fmt: skip
    assert len(set(places)) == len(places)
    assert all(x < 24 for x, _ in places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
