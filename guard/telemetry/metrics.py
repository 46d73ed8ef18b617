"""Prometheus metrics: each declared once, with its unit, its meaning and its labels, in a registry of its own.

Owns names, labels and buckets, and how one ``RequestRecord`` is counted. Every label's values are known at start, and
the series exist from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from detectors.base import ScoreStatus
from guard.policy.store import Reload
from guard.telemetry.ledger import Result
from guard.telemetry.record import Beside, Outcome, RequestRecord

CONTENT_TYPE = CONTENT_TYPE_LATEST
HIT_ACTIONS = ("allow", "flag", "redact", "steer", "retry", "route", "block")
ACTIONS = ("none", *HIT_ACTIONS)
OWN_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
ENGINE_BUCKETS_S = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
SCORE_BUCKETS = tuple(step / 20 for step in range(21))


class Metrics:
    """All series of one proxy. ``routes``, ``rules`` and ``detectors`` (name to kind) bound the labels.

    The policy given first is the one that judges at start; ``add_policy`` makes room for others.
    """

    def __init__(
        self,
        policy: str,
        policy_hash: str,
        routes: Sequence[str],
        rules: Sequence[str],
        detectors: Mapping[str, str],
    ) -> None:
        self._kinds: dict[tuple[str, str], str] = {}
        self._routes = tuple(routes)
        self._shown: dict[str, str] = {}
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "guard_requests_total",
            "Requests that ended, by what was decided and how they ended.",
            ("route", "policy", "action", "outcome"),
            registry=registry,
        )
        self.rule_hits = Counter(
            "guard_rule_hits_total",
            "Rules that hit; mode shadow was not acted upon.",
            ("policy", "rule", "action", "mode"),
            registry=registry,
        )
        self.detector_results = Counter(
            "guard_detector_results_total",
            "Results of detectors; unavailable: there was no score, and on_error decided.",
            ("detector", "kind", "status"),
            registry=registry,
        )
        self.detector_scores = Histogram(
            "guard_detector_score",
            "Scores of detectors; higher is likelier what the detector looks for.",
            ("detector", "kind"),
            buckets=SCORE_BUCKETS,
            registry=registry,
        )
        self.own = Histogram(
            "guard_added_latency_seconds",
            "The guard's own work on a request before the answer's first byte, waiting for vLLM left out.",
            ("route",),
            buckets=OWN_BUCKETS_S,
            registry=registry,
        )
        self.verdict = Histogram(
            "guard_verdict_seconds",
            "From sending a request upstream to the decision; until then the first byte is held.",
            ("route",),
            buckets=ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.upstream_first_byte = Histogram(
            "guard_upstream_first_byte_seconds",
            "From sending a request upstream to the first byte that came back, readouts included.",
            ("route",),
            buckets=ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.upstream = Histogram(
            "guard_upstream_seconds",
            "From sending a request upstream to the end of its answer, or to its being cut.",
            ("route",),
            buckets=ENGINE_BUCKETS_S,
            registry=registry,
        )
        self.in_flight = Gauge("guard_requests_in_flight", "Requests under way.", ("route",), registry=registry)
        self.ledger_entries = Counter(
            "guard_ledger_entries_total",
            "Ledger entries: written, delayed (the disk refused; tried again), failed (it refused to the end), dropped "
            "(too many waited).",
            ("result",),
            registry=registry,
        )
        self.policy_info = Gauge(
            "guard_policy_info", "1 for each policy that may judge requests.", ("policy", "hash"), registry=registry
        )
        self.shadow_decisions = Counter(
            "guard_shadow_decisions_total",
            "Decisions of a policy (action) and what the shadow policy beside it would have done (would).",
            ("policy", "shadow", "action", "would"),
            registry=registry,
        )
        self.policy_reloads = Counter(
            "guard_policy_reloads_total",
            "Changes of policy files: success, failure (the policies before them stay), noop (they say the same).",
            ("result",),
            registry=registry,
        )
        self.policy_loaded = Gauge(
            "guard_policy_loaded_timestamp_seconds",
            "When the policies that judge now were loaded, in seconds since 1970.",
            registry=registry,
        )
        for route in routes:
            for by_route in (self.own, self.verdict, self.upstream_first_byte, self.upstream, self.in_flight):
                by_route.labels(route)
        for result in get_args(Result):
            self.ledger_entries.labels(result)
        for reload_result in get_args(Reload):
            self.policy_reloads.labels(reload_result)
        self.add_policy(policy, rules, detectors)
        self.show_policies({policy: policy_hash})

    def add_policy(self, policy: str, rules: Sequence[str], detectors: Mapping[str, str]) -> None:
        """Create the series of one policy. Those of rules that it had before stay."""
        for route, action, outcome in product(self._routes, ACTIONS, get_args(Outcome)):
            self.requests.labels(route, policy, action, outcome)
        for rule, action, mode in product(rules, HIT_ACTIONS, ("enforce", "shadow")):
            self.rule_hits.labels(policy, rule, action, mode)
        for name, kind in detectors.items():
            self._kinds[policy, name] = kind
            self.detector_scores.labels(name, kind)
            for status in get_args(ScoreStatus):
                self.detector_results.labels(name, kind, status)

    def add_shadow(self, policy: str, shadow: str) -> None:
        """Create the series of a shadow policy beside another."""
        for action, would in product(HIT_ACTIONS, HIT_ACTIONS):
            self.shadow_decisions.labels(policy, shadow, action, would)

    def show_policies(self, hashes: Mapping[str, str]) -> None:
        """Say which policies may judge from now on, by the hash of each."""
        for name, hash_ in self._shown.items():
            if hashes.get(name) != hash_:
                self.policy_info.remove(name, hash_)
        for name, hash_ in hashes.items():
            self.policy_info.labels(name, hash_).set(1)
        self._shown = dict(hashes)
        self.policy_loaded.set_to_current_time()

    def count_reload(self, result: Reload) -> None:
        self.policy_reloads.labels(result).inc()

    def count(self, record: RequestRecord) -> None:
        """Add one finished request."""
        route = record.route
        self.requests.labels(route, record.policy, record.action, record.outcome).inc()
        for hit in record.hits:
            self.rule_hits.labels(record.policy, hit.rule, hit.action, hit.mode).inc()
        answered = record.answer.scores if record.answer else {}
        for name, score in {**answered, **record.scores}.items():
            kind = self._kinds[record.policy, name]
            self.detector_results.labels(name, kind, score.status).inc()
            if score.value is not None:
                self.detector_scores.labels(name, kind).observe(score.value)
        if record.shadow is not None:
            self._count_shadow(record, record.shadow)
        if record.decision:
            self.own.labels(route).observe(record.own_s)
        for histogram, duration_s in (
            (self.verdict, record.verdict_s),
            (self.upstream_first_byte, record.upstream_first_byte_s),
            (self.upstream, record.upstream_s),
        ):
            if duration_s is not None:
                histogram.labels(route).observe(duration_s)

    def _count_shadow(self, record: RequestRecord, shadow: Beside) -> None:
        answered = record.answer.shadow if record.answer else None
        for hit in (*shadow.decision.hits, *(answered.hits if answered else ())):
            self.rule_hits.labels(shadow.policy, hit.rule, hit.action, "shadow").inc()
        self.shadow_decisions.labels(record.policy, shadow.policy, record.action, shadow.decision.action).inc()

    def count_entries(self, result: Result, entries: int) -> None:
        self.ledger_entries.labels(result).inc(entries)

    def exposition(self) -> bytes:
        """What ``/metrics`` answers."""
        return generate_latest(self.registry)
