"""Metrics count what requests did, under labels that are all known at start."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from detectors.base import Score
from guard.policy import Decision, RuleHit
from guard.telemetry.metrics import Metrics
from guard.telemetry.record import Beside
from tests.telemetry.records import CHAT, blocked, record

CONTRACT = {
    "guard_requests": {"route", "policy", "action", "outcome"},
    "guard_rule_hits": {"policy", "rule", "action", "mode"},
    "guard_detector_results": {"detector", "kind", "status"},
    "guard_detector_score": {"detector", "kind"},
    "guard_added_latency_seconds": {"route"},
    "guard_verdict_seconds": {"route"},
    "guard_upstream_first_byte_seconds": {"route"},
    "guard_upstream_seconds": {"route"},
    "guard_requests_in_flight": {"route"},
    "guard_ledger_entries": {"result"},
    "guard_policy_info": {"policy", "hash"},
    "guard_policy_loaded_timestamp_seconds": set(),
    "guard_policy_reloads": {"result"},
    "guard_shadow_decisions": {"policy", "shadow", "action", "would"},
}
"""Names and labels that dashboards and alerts rely on. A change here breaks them."""


@pytest.fixture
def metrics() -> Metrics:
    detectors = {"injection": "probe", "focus": "attention_tracker"}
    metrics = Metrics("default", "0" * 64, (CHAT, "other"), ("injection", "distracted"), detectors)
    metrics.add_shadow("default", "next")
    return metrics


def series(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[name, frozenset(labels.items())]


def families(metrics: Metrics) -> dict[str, set[str]]:
    return {
        family.name: {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in text_string_to_metric_families(metrics.exposition().decode())
        if not family.name.endswith("_created")
    }


def test_names_and_labels_are_those_that_dashboards_rely_on(metrics: Metrics) -> None:
    assert families(metrics) == CONTRACT


def test_every_series_exists_before_the_first_request(metrics: Metrics) -> None:
    before = series(metrics).keys()
    metrics.count(blocked())
    metrics.count(record(outcome="client_gone", route="other"))
    metrics.count_entries("failed", 1)
    assert series(metrics).keys() == before


def test_a_blocked_request_counts_by_action_and_outcome_and_its_rules_by_mode(metrics: Metrics) -> None:
    metrics.count(blocked())
    requests = {"route": CHAT, "policy": "default", "action": "block", "outcome": "blocked"}
    assert value(metrics, "guard_requests_total", **requests) == 1
    hits = {"policy": "default"}
    assert value(metrics, "guard_rule_hits_total", **hits, rule="injection", action="block", mode="enforce") == 1
    assert value(metrics, "guard_rule_hits_total", **hits, rule="distracted", action="flag", mode="shadow") == 1
    assert sum(count for (name, _), count in series(metrics).items() if name == "guard_rule_hits_total") == 2


def test_a_score_is_observed_and_a_missing_one_is_counted_but_not_as_zero(metrics: Metrics) -> None:
    metrics.count(blocked())
    injection = {"detector": "injection", "kind": "probe"}
    focus = {"detector": "focus", "kind": "attention_tracker"}
    assert value(metrics, "guard_detector_score_bucket", **injection, le="1.0") == 1
    assert value(metrics, "guard_detector_score_bucket", **injection, le="0.95") == 0
    assert value(metrics, "guard_detector_score_count", **focus) == 0
    assert value(metrics, "guard_detector_results_total", **focus, status="unavailable") == 1


def test_times_are_observed_in_seconds_in_buckets_that_show_parts_of_a_millisecond(metrics: Metrics) -> None:
    metrics.count(blocked())
    assert value(metrics, "guard_added_latency_seconds_bucket", route=CHAT, le="0.0005") == 1
    assert value(metrics, "guard_added_latency_seconds_bucket", route=CHAT, le="0.00025") == 0
    assert value(metrics, "guard_verdict_seconds_sum", route=CHAT) == pytest.approx(0.03)


def test_a_request_that_was_refused_does_not_dilute_the_latencies(metrics: Metrics) -> None:
    metrics.count(record(outcome="refused", status=400))
    assert value(metrics, "guard_added_latency_seconds_count", route=CHAT) == 0
    assert value(metrics, "guard_upstream_seconds_count", route=CHAT) == 0


def test_a_policy_that_is_loaded_later_has_its_series_before_its_first_request_and_the_old_hash_goes(
    metrics: Metrics,
) -> None:
    metrics.add_policy("next", ("injection", "new"), {"injection": "other_kind"})
    metrics.show_policies({"next": "1" * 64})
    before = series(metrics)
    assert ("guard_policy_info", frozenset({"policy": "next", "hash": "1" * 64}.items())) in before
    assert ("guard_policy_info", frozenset({"policy": "default", "hash": "0" * 64}.items())) not in before
    late = blocked()
    metrics.count(late)  # a request that the policy before it still judged
    late.policy, late.shadow = "next", None
    late.scores = {"injection": Score("scored", 0.5)}
    metrics.count(late)
    assert value(metrics, "guard_detector_results_total", detector="injection", kind="other_kind", status="scored") == 1
    metrics.count_reload("failure")
    assert value(metrics, "guard_policy_reloads_total", result="failure") == 1


def test_a_shadow_policy_is_counted_beside_the_live_one_and_its_rules_as_shadows(metrics: Metrics) -> None:
    metrics.add_policy("next", ("distracted",), {})
    before = series(metrics).keys()
    one = blocked()
    assert one.decision is not None
    hit = RuleHit("distracted", "flag", "enforce", "why", on_error=False)
    would = Decision("flag", "distracted", "why", "", (hit,), (), ("distracted",), "flag")
    one.shadow = Beside("next", "1" * 64, {}, {}, would)
    metrics.count(one)
    pair = {"policy": "default", "shadow": "next", "action": "block", "would": "flag"}
    assert value(metrics, "guard_shadow_decisions_total", **pair) == 1
    labels = {"policy": "next", "rule": "distracted", "action": "flag", "mode": "shadow"}
    assert value(metrics, "guard_rule_hits_total", **labels) == 1
    assert series(metrics).keys() == before


def test_names_follow_prometheus_conventions(metrics: Metrics) -> None:
    text = metrics.exposition().decode()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert name.startswith("guard_")
        assert kind != "counter" or name.endswith("_total")
    assert all(help_.endswith(".") for help_ in re.findall(r"^# HELP guard_\S+ (.*)$", text, re.MULTILINE))


def test_two_proxies_in_one_process_do_not_share_their_counts(metrics: Metrics) -> None:
    other = Metrics("default", "0" * 64, (CHAT,), (), {})
    metrics.count_entries("written", 3)
    assert value(metrics, "guard_ledger_entries_total", result="written") == 3
    assert value(other, "guard_ledger_entries_total", result="written") == 0
