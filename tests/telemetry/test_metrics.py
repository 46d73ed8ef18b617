"""Metrics count what requests did, under labels that are all known at start."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from detectors.base import Score
from guard.policy import Decision, RuleHit
from guard.telemetry.families import PROXY, STATUSES
from guard.telemetry.family import created
from guard.telemetry.metrics import Metrics, PolicyLabels
from guard.telemetry.record import Beside
from guard.telemetry.reference import reference
from guard.telemetry.shared_series import exposition_of, fold
from tests.telemetry.records import CHAT, DEFAULT, blocked, metrics_of, record


@pytest.fixture
def metrics() -> Metrics:
    return metrics_of()


def series(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[name, frozenset(labels.items())]


def test_what_is_exposed_is_what_is_declared_label_by_label(metrics: Metrics) -> None:
    metrics.count(blocked())
    declared = {family.name: family for family in PROXY}
    exposed = [one for one in text_string_to_metric_families(metrics.exposition().decode())]
    assert {one.name for one in exposed if one.name.endswith("_created")} == {created(one) for one in PROXY} - {None}
    exposed = [one for one in exposed if not one.name.endswith("_created")]
    assert {name_of(one) for one in exposed} == declared.keys()
    for one in exposed:
        family = declared[name_of(one)]
        assert (one.type, one.documentation) == (family.kind, family.meaning)
        for sample in one.samples:
            assert sample.labels.keys() - {"le"} == family.labels.keys()
            for label, known in family.labels.items():
                assert isinstance(known, str) or sample.labels[label] in known


def name_of(exposed: Metric) -> str:
    return exposed.name + ("_total" if exposed.type == "counter" else "")


def test_the_page_is_written_from_the_declarations() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m guard.telemetry.reference > docs/metrics.md"


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
    threshold = {"policy": "default", "rule": "injection", "detector": "injection", "bound": "at_least"}
    assert value(metrics, "guard_rule_threshold", **threshold) == 0.91
    bounds = (("new", "injection", "below", 0.5),)
    metrics.show([PolicyLabels("next", "1" * 64, ("injection", "new"), {"injection": "other_kind"}, bounds)])
    before = series(metrics)
    assert ("guard_policy_info", frozenset({"policy": "next", "hash": "1" * 64}.items())) in before
    assert ("guard_policy_info", frozenset({"policy": "default", "hash": "0" * 64}.items())) not in before
    assert [labels for name, labels in before if name == "guard_rule_threshold"] == [
        frozenset({"policy": "next", "rule": "new", "detector": "injection", "bound": "below"}.items())
    ]
    late = blocked()
    metrics.count(late)  # a request that the policy before it still judged
    late.policy, late.shadow = "next", None
    late.scores = {"injection": Score("scored", 0.5)}
    metrics.count(late)
    assert value(metrics, "guard_detector_results_total", detector="injection", kind="other_kind", status="scored") == 1


def renamed(name: str) -> PolicyLabels:
    """The default policy, and everything in it, by other names."""
    return PolicyLabels(name, (name * 64)[:64], (f"{name}-rule",), {f"{name}-detector": "probe"})


def test_policies_that_are_renamed_again_and_again_do_not_make_the_page_grow(metrics: Metrics) -> None:
    lines = []
    for number in range(5):
        metrics.show([renamed(f"p{number}")], [(f"p{number}", f"p{number}")])
        lines.append(len(metrics.exposition().splitlines()))
    assert lines[1:] == [lines[1]] * 4, "those that are loaded, and those just before them"
    page = metrics.exposition().decode()
    assert not re.search(r"default|focus|injection|distracted|p[012]\b", page)
    assert '"p3"' in page


def test_a_rule_or_detector_that_is_gone_goes_though_its_policy_stays(metrics: Metrics) -> None:
    metrics.count(blocked())
    for number in (1, 2):
        metrics.show([PolicyLabels("default", str(number) * 64, ("injection",), {"injection": "probe"})])
    page = metrics.exposition().decode()
    assert not re.search(r"focus|distracted", page)
    hits = {"policy": "default", "rule": "injection", "action": "block", "mode": "enforce"}
    assert value(metrics, "guard_rule_hits_total", **hits) == 1, "what stays goes on counting"


def test_a_request_that_outlives_its_policy_by_two_changes_counts_and_then_goes_with_the_next(metrics: Metrics) -> None:
    for number in range(2):
        metrics.show([renamed(f"p{number}")])
    metrics.count(blocked())
    labels = {"route": CHAT, "policy": "default", "action": "block", "outcome": "blocked"}
    assert value(metrics, "guard_requests_total", **labels) == 1
    metrics.show([renamed("p2")])
    assert not re.search(r"default|focus|injection|distracted", metrics.exposition().decode())


def test_files_that_cannot_be_used_are_seen_until_a_change_can(metrics: Metrics) -> None:
    assert value(metrics, "guard_policy_files_in_force") == 1
    metrics.count_reload("failure")
    assert value(metrics, "guard_policy_reloads_total", result="failure") == 1
    assert value(metrics, "guard_policy_files_in_force") == 0
    metrics.count_reload("noop")
    assert value(metrics, "guard_policy_files_in_force") == 1


def test_a_missing_score_says_why_and_a_score_says_how_long_it_took(metrics: Metrics) -> None:
    late = Score("unavailable", reason="no readouts within 1 s", timed_out=True)
    dropped = Score("unavailable", reason="no space for these rows at once (max_shared_bytes)", dropped=True)
    for score in (late, dropped, Score("scored", 0.2, took_s=0.00003), Score("not_applicable")):
        metrics.count(record(scores={"injection": score}, outcome="completed"))
    injection = {"detector": "injection", "kind": "probe"}
    statuses = {one: value(metrics, "guard_detector_results_total", **injection, status=one) for one in STATUSES}
    assert statuses == {"scored": 1, "late": 1, "dropped": 1, "not_applicable": 1, "unavailable": 0}
    assert value(metrics, "guard_detector_seconds_count", **injection) == 1
    assert value(metrics, "guard_detector_seconds_bucket", **injection, le="5e-05") == 1
    assert value(metrics, "guard_detector_seconds_bucket", **injection, le="2.5e-05") == 0


def test_a_refusal_by_a_limit_counts_whose_and_which(metrics: Metrics) -> None:
    metrics.count(record(outcome="refused", status=429, limit=("tenant", "tokens")))
    assert value(metrics, "guard_limit_refusals_total", scope="tenant", limit="tokens") == 1
    assert value(metrics, "guard_limit_refusals_total", scope="key", limit="tokens") == 0


def test_a_shadow_policy_is_counted_beside_the_live_one_and_its_rules_as_shadows(metrics: Metrics) -> None:
    metrics.show([DEFAULT, PolicyLabels("next", "1" * 64, ("distracted",), {})])
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
    other = metrics_of()
    metrics.count_entries("written", 3)
    assert value(metrics, "guard_ledger_entries_total", result="written") == 3
    assert value(other, "guard_ledger_entries_total", result="written") == 0


WORKER = """
import sys
from guard.telemetry.metrics import PolicyLabels
from tests.telemetry.records import blocked, metrics_of

metrics = metrics_of()
for line in sys.stdin:
    match line.split():
        case ["count"]: metrics.count(blocked())
        case ["begin"]: metrics.in_flight.labels("other").inc()
        case ["reload", hash]: metrics.show([PolicyLabels("default", hash * 64, (), {})])
        case ["fail"]: metrics.count_reload("failure")
        case ["show"]: sys.stdout.write(metrics.exposition().decode())
    print("done", flush=True)
"""


class Worker:
    """A worker process of the proxy, as far as metrics go. It shares ``folder`` with others."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=pipe, stdout=pipe, env=environment, text=True
        )

    def do(self, *words: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(words) + "\n")
        self.process.stdin.flush()
        return "".join(iter(self.process.stdout.readline, "done\n"))

    def end(self) -> None:
        self.process.communicate()

    def value(self, name: str, **labels: str) -> float:
        return values_in(self.do("show"))[name, frozenset(labels.items())]


def values_in(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def test_every_worker_process_answers_with_the_numbers_of_all(tmp_path: Path) -> None:
    one, other = Worker(tmp_path), Worker(tmp_path)
    try:
        for worker in (one, one, other):
            worker.do("count")
        one.do("begin")
        other.do("begin")
        other.do("reload", "1")
        other.do("fail")
        scored = {"detector": "injection", "kind": "probe"}
        for worker in (one, other):
            found = values_in(worker.do("show"))

            def value(name: str, values: object = found, **labels: str) -> float:
                assert isinstance(values, dict)
                return float(values[name, frozenset(labels.items())])

            assert value("guard_requests_total", route=CHAT, policy="default", action="block", outcome="blocked") == 3
            assert value("guard_detector_score_bucket", **scored, le="1.0") == 3
            assert value("guard_added_latency_seconds_count", route=CHAT) == 3
            assert value("guard_requests_in_flight", route="other") == 2
            assert value("guard_policy_files_in_force") == 0, "of one of them they are not"
            for hash_ in ("0", "1"):
                assert value("guard_policy_info", policy="default", hash=hash_ * 64) == 1, "they do not agree"
        one.do("reload", "1")
        assert other.value("guard_policy_info", policy="default", hash="0" * 64) == 0
        one.end()
        fold(tmp_path, {one.process.pid})
        assert other.value("guard_requests_in_flight", route="other") == 1, "what it had under way is over"
        assert other.value("guard_added_latency_seconds_count", route=CHAT) == 3, "what it had counted stays"
    finally:
        for worker in (one, other):
            worker.process.kill()
            worker.process.wait()


def test_workers_that_ended_leave_their_counts_in_one_file_and_no_read_misses_or_doubles_any(tmp_path: Path) -> None:
    made, living = Worker(tmp_path), Worker(tmp_path)
    try:
        made.do("count")
        living.do("count")
        made.do("reload", "1")
        made.end()
        pid = made.process.pid
        # As many have ended as there are copies of what one of them left, one of these killed while it made a file.
        ended = [pid + 1_000_000 * i for i in range(1, 21)]
        for file in tmp_path.glob(f"*_{pid}.db"):
            for one in ended:
                shutil.copy(file, tmp_path / file.name.replace(str(pid), str(one)))
        Path(tmp_path, f"counter_{pid * 7}.db").touch()
        fold(tmp_path, {pid, pid * 7})
        labels = {"route": CHAT, "policy": "default", "action": "block", "outcome": "blocked"}
        seen, done = [], threading.Event()

        def read() -> None:
            while True:
                found = values_in(exposition_of(tmp_path).decode())
                counted = found["guard_requests_total", frozenset(labels.items())]
                seen.append((counted, found["guard_added_latency_seconds_count", frozenset({("route", CHAT)})]))
                if done.is_set():
                    return

        reading = threading.Thread(target=read)
        reading.start()
        for one in ended:
            fold(tmp_path, {one})
        done.set()
        reading.join()
        read()
        assert set(seen) == {(22.0, 22.0)}
        assert living.value("guard_requests_total", **labels) == 22
        assert living.value("guard_detector_score_bucket", detector="injection", kind="probe", le="1.0") == 22
        assert living.value("guard_policy_files_in_force") == 1
        bound = {"policy": "default", "rule": "injection", "detector": "injection", "bound": "at_least"}
        assert math.isnan(living.value("guard_rule_threshold", **bound)), "who was told last knows that it is gone"
        processes = {file.stem.rpartition("_")[2] for file in tmp_path.glob("*.db")}
        assert processes == {str(living.process.pid), "ended"}
    finally:
        for worker in (made, living):
            worker.process.kill()
            worker.process.wait()


def test_a_folder_that_is_named_too_late_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="already been imported"):
        metrics_of()
