"""Dashboards, rules and pages about metrics say what the proxy and the engine's side expose, both ways."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from guard.dashboards.grafana import to_json
from guard.dashboards.pages import PAGES
from guard.dashboards.panel import EVERYWHERE, Page
from guard.mia.metrics import ENGINE
from guard.serve import ServeOptions
from guard.settings import Settings
from guard.telemetry.families import PROXY
from guard.telemetry.family import Family

FOLDER = Path(__file__).parents[2] / "dashboards"
RULES = yaml.safe_load((FOLDER / "prometheus" / "rules.yml").read_text())
README = (FOLDER / "README.md").read_text(encoding="utf-8")
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus itself adds."""


def names() -> dict[str, Family]:
    """Every name that a query may use."""
    found = {}
    for family in (*PROXY, *ENGINE):
        ends = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {family.name + end: family for end in ends}
    return found


def recorded() -> set[str]:
    return {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def queries() -> Iterator[tuple[str, str]]:
    """Where it stands, and the query."""
    yield from ((f"${name}", query) for name, query in EVERYWHERE.items())
    for page in PAGES:
        yield from ((f"{page.uid}: {panel.title}", query.expr) for panel in page.panels for query in panel.queries)
        yield from ((f"{page.uid}: ${name}", query) for name, query in page.variables.items())
    for group in RULES["groups"]:
        yield from ((rule.get("record") or rule["alert"], rule["expr"]) for rule in group["rules"])
    (block,) = re.findall(r"```promql\n(.*?)```", README, re.DOTALL)
    yield from (("dashboards/README.md", line) for line in block.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(("where", "expr"), list(queries()), ids=lambda one: one if len(one) < 60 else "")
def test_queries_name_metrics_labels_and_values_that_exist(where: str, expr: str) -> None:
    known = names()
    for name, selector in re.findall(r"\b((?:guard|mia)[_:][\w:]+)(?:\{(.*?)\})?", expr):
        if ":" in name:
            assert name in recorded(), where
            continue
        family = known[name]
        for label, value in re.findall(r'(\w+)[!=~]+"(.*?)"', selector or ""):
            assert label in family.labels.keys() | ADDED, (where, label)
            values = family.labels.get(label)
            if isinstance(values, tuple):
                assert set(value.split("|")) <= set(values) | {""}, (where, value)
    by = {label for labels in re.findall(r"by \((.*?)\)", expr) for label in labels.split(", ")}
    assert by <= {label for family in known.values() for label in family.labels} | ADDED, where


def test_every_metric_is_looked_at_somewhere() -> None:
    text = " ".join(expr for _, expr in queries())
    unseen = {family.name for family in (*PROXY, *ENGINE) if family.name not in text}
    assert unseen == {"mia_captured_rows_total"}, "its bytes are"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.uid)
def test_the_files_are_what_the_code_makes(page: Page) -> None:
    file = FOLDER / "grafana" / f"{page.uid}.json"
    assert file.read_text(encoding="utf-8") == to_json(page), "run: python -m guard.dashboards"
    board = json.loads(file.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", file.read_text(encoding="utf-8"))) - {"__rate_interval"}
    assert used <= variables
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in board["panels"])


def test_no_file_is_left_of_a_dashboard_that_is_gone() -> None:
    assert {file.stem for file in (FOLDER / "grafana").iterdir()} == {page.uid for page in PAGES}


def test_prometheus_is_pointed_at_the_ports_that_guard_serve_uses() -> None:
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    port, engine_port = Settings.model_fields["port"].default, ServeOptions().engine_port
    assert targets == {"guard": [f"127.0.0.1:{port}"], "vllm": [f"127.0.0.1:{engine_port}"]}


def test_grafana_finds_what_is_provisioned() -> None:
    provisioning = FOLDER / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "guard.yml").read_text())["providers"]
    assert provider["type"] == "file"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    compose = yaml.safe_load((FOLDER.parent / "deploy" / "compose" / "compose.yaml").read_text())
    grafana = compose["services"]["grafana"]
    assert f"../../dashboards/grafana:{provider['options']['path']}:ro" in grafana["volumes"]
    assert "../../dashboards/provisioning:/etc/grafana/provisioning:ro" in grafana["volumes"]
    assert source["url"] == "${PROMETHEUS_URL}"
    assert "PROMETHEUS_URL" in grafana["environment"]


def test_every_alert_has_a_test_and_says_what_to_do() -> None:
    tests = yaml.safe_load((FOLDER / "prometheus" / "rules.test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    alerts = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
    assert fired == alerts.keys()
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_alerts_are_tested_with_series_that_the_product_can_make() -> None:
    known = names()
    tests = yaml.safe_load((FOLDER / "prometheus" / "rules.test.yml").read_text())["tests"]
    for series in (one["series"] for test in tests for one in test["input_series"]):
        name, selector = re.fullmatch(r"(\w+)\{(.*)\}", series).groups()  # type: ignore[union-attr]
        if name == "up":
            continue
        for label, value in re.findall(r'(\w+)="(.*?)"', selector):
            assert label in known[name].labels.keys() | ADDED, series
            values = known[name].labels.get(label)
            assert not isinstance(values, tuple) or value in values, series


def test_no_share_of_requests_counts_what_anybody_without_a_key_can_make() -> None:
    """A query that divides by requests leaves out those that were refused, or not judged."""
    wholes = [
        (where, selector)
        for where, expr in queries()
        for selector in re.findall(r"/ [^/]*?guard_requests_total(\{.*?\})?", expr)
    ]
    assert len(wholes) >= 6
    assert [where for where, selector in wholes if not re.search(r'action!="none"|outcome!="refused"', selector)] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize(
    "command", [("check", "config", "prometheus.yml"), ("test", "rules", "rules.test.yml")], ids=" ".join
)
def test_promtool_accepts_the_files_and_the_rules_do_what_their_tests_say(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [shutil.which("promtool") or "", *command],
        cwd=FOLDER / "prometheus",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
