"""What `dashboards/` says about metrics is what the proxy exposes, both ways."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from guard.serve import ServeOptions
from guard.settings import Settings
from guard.telemetry.metrics import Metrics
from tests.telemetry.records import CHAT

FOLDER = Path(__file__).parents[2] / "dashboards"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def exposed() -> dict[str, set[str]]:
    """Names as they are queried, histograms without suffix, to their labels."""
    metrics = Metrics("default", "0" * 64, (CHAT,), ("rule",), {"injection": "probe"})
    metrics.add_shadow("default", "candidate")
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        family.name + ("_total" if family.type == "counter" else ""): {
            label for sample in family.samples for label in sample.labels
        }
        - {"le"}
        for family in families
        if not family.name.endswith("_created")
    }


def test_the_table_lists_every_metric_with_its_labels_and_no_other() -> None:
    table = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, labels in re.findall(r"^\| `(guard_\w+)` \| ([^|]+) \|", README, re.MULTILINE)
    }
    assert table == exposed()


def test_queries_name_metrics_and_labels_that_exist() -> None:
    (queries,) = re.findall(r"```promql\n(.*?)```", README, re.DOTALL)
    known = exposed()
    for name, selector in re.findall(r"(guard_\w+)(?:\{(.*?)\})?", queries):
        labels = known[name.removesuffix("_bucket")]
        assert set(re.findall(r"(\w+)=", selector)) <= labels


def test_prometheus_is_pointed_at_the_ports_that_guard_serve_uses() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in config["scrape_configs"]}
    port, engine_port = Settings.model_fields["port"].default, ServeOptions().engine_port
    assert targets == {"guard": [f"127.0.0.1:{port}"], "vllm": [f"127.0.0.1:{engine_port}"]}
