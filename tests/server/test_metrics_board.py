"""The Grafana board and Prometheus's alerts: every name in them is one that a server shows, and the
alerts are the doctor's rules.

That Prometheus loads the rules, that alerts fire and that the board's queries give data was tried
with Prometheus itself (docs/observability.md); here their expressions are only read for names.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo.doctor.rules import RULES
from serving import Server

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GROUPS = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
PANELS = BOARD["panels"]
VARIABLES = BOARD["templating"]["list"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
ASKED = [variable["query"]["query"] for variable in VARIABLES if variable["type"] == "query"]

# Of PromQL; a name is none of these, and stands where no label does.
WORDS = frozenset((
    "and", "or", "unless", "on", "ignoring", "by", "without", "offset", "bool", "sum", "min", "max",
    "avg", "count", "rate", "increase", "changes", "histogram_quantile", "min_over_time",
    "label_values",
))  # fmt: skip
GIVEN = {"job", "instance"}  # labels that Prometheus adds
ADDED = {"le"}  # of buckets
OF_PROMETHEUS = {"up": GIVEN, "ALERTS": {"alertname", "alertstate"}}


@pytest.fixture(scope="module")
def page(server: Server) -> dict[str, set[str]]:
    """The labels of every name on a server's page."""
    server.complete(server.say("ABC"))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return {**found, **OF_PROMETHEUS}


def names_in(expression: str) -> tuple[set[str], set[str]]:
    """(metrics, labels) that an expression names."""
    text = re.sub(r"\$__?[a-z_]+", "1m", expression)
    text = re.sub(r'"[^"]*"', '""', text)
    labels = set(re.findall(r"([a-z_]+)\s*(?:=~|!~|!=|=)\s*\"\"", text))
    listed = re.findall(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", text)
    labels |= {word for group in listed for word in re.findall(r"\w+", group)}
    text = re.sub(r"\b(?:by|on|without|ignoring)\s*\([^)]*\)", " ", text)
    text = re.sub(r"\{[^}]*\}", "", text)
    text = re.sub(r"\[[^\]]*\]|\boffset\s+\w+", "", text)
    metrics = set(re.findall(r"[A-Za-z_:][\w:]*", text)) - WORDS
    if expression.startswith("label_values("):
        label = expression.rpartition(",")[2].strip(" )")
        metrics.discard(label)
        labels.add(label)
    return metrics, labels


def test_the_reader_of_names() -> None:
    metrics, labels = names_in(
        'sum by (a, le) (rate(vllm:x_bucket{b=~"$c", d="e=f"}[$__rate_interval])) > 1 '
        "and on (g) (y offset 5m)"
    )
    assert metrics == {"vllm:x_bucket", "y"}
    assert labels == {"a", "le", "b", "d", "g"}


@pytest.mark.parametrize(
    "expression", [*QUERIES, *ASKED, *(alert["expr"] for alert in ALERTS),
                   *(note["expr"] for note in BOARD["annotations"]["list"])],
)  # fmt: skip
def test_every_metric_and_label_is_on_a_servers_page(
    expression: str, page: dict[str, set[str]]
) -> None:
    metrics, labels = names_in(expression)
    assert metrics
    assert metrics - page.keys() == set()
    known = {label for metric in metrics for label in page[metric]}
    assert labels - known - GIVEN - ADDED == set()
    for open_, close in ("()", "{}", "[]"):
        assert expression.count(open_) == expression.count(close)
    assert expression.count('"') % 2 == 0


def test_every_rule_of_the_doctor_is_an_alert_or_says_why_not() -> None:
    mirrored = [alert["labels"]["rule"] for alert in ALERTS]
    text = (ROOT / "docs/observability.md").read_text().partition("## Alerts")[2]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", text, re.MULTILINE)
    without = {name: reason for name, reason in rows if name not in mirrored}
    assert len(set(mirrored)) == len(mirrored)
    assert sorted([*mirrored, *without]) == sorted(rule.name for rule in RULES)
    assert all(len(reason) > 20 for reason in without.values())


def test_an_alert_has_the_doctors_severity_and_leads_to_the_cure() -> None:
    anchors = set(re.findall(r'<a id="([a-z-]+)">', (ROOT / "docs/troubleshooting.md").read_text()))
    severity = {rule.name: rule.severity for rule in RULES}
    names = [alert["alert"] for alert in ALERTS]
    assert len(set(names)) == len(names)
    for alert in ALERTS:
        rule = alert["labels"]["rule"]
        assert alert["labels"]["severity"] == severity[rule]
        assert alert["annotations"]["docs"] == f"docs/troubleshooting.md#{rule}"
        assert rule in anchors
        assert {"summary", "description"} <= alert["annotations"].keys()
        # An alert on a gauge of this moment must hold for a while; on counts over time it has.
        overtime = re.search(r"increase|changes|_over_time", alert["expr"])
        assert re.fullmatch(r"\d+m", alert.get("for", "" if not overtime else "1m"))


def test_prometheus_reads_the_rules_and_asks_with_the_key() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert config["rule_files"] == ["prometheus-rules.yaml"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "octavo"  # which an alert names
    assert job["authorization"]["type"] == "Bearer"
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounted = {line.split(":")[0] for line in compose["services"]["prometheus"]["volumes"]}
    assert mounted == {"./prometheus.yaml", "./prometheus-rules.yaml"}


def sources_in(part: Any) -> Iterator[dict[str, str]]:
    """Every data source that a part of the board names."""
    if isinstance(part, dict):
        if "datasource" in part:
            yield part["datasource"]
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from sources_in(one)


def test_the_board_can_be_imported_anywhere() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    assert BOARD["id"] is None
    assert {source["uid"] for source in sources_in(BOARD)} == {"${datasource}"}
