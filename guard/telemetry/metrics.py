"""The proxy's Prometheus series: made when a policy is loaded, and how one ``RequestRecord`` is counted.

Owns the counting, in a registry of its own, or, where ``PROMETHEUS_MULTIPROC_DIR`` names a folder, in files there that
all worker processes share: then every process answers ``/metrics`` with the numbers of all. What there is to count is
declared in ``families``. Every label's values are known when policies are loaded, and the series exist from then on;
those of policies that are gone go as well, but for those in shared files.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, generate_latest, values
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

from detectors.base import Score
from guard import __version__
from guard.policy.store import Reload
from guard.telemetry import families as f
from guard.telemetry.family import counter, gauge, histogram
from guard.telemetry.family import values as values_of
from guard.telemetry.ledger import Result
from guard.telemetry.record import Beside, Malformed, RequestRecord
from guard.telemetry.shared_series import exposition_of

CONTENT_TYPE = CONTENT_TYPE_LATEST
SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus-client's variable: the folder of files that several worker processes count in. It must be set before
prometheus-client is imported, be empty at start, and not be passed on to vLLM, which has a use for it, too."""

Stem = frozenset[tuple[str, str]]
"""Labels, with values, that all series of one policy, rule, detector or pair of policies have."""

M = TypeVar("M", bound=MetricWrapperBase)

Bound = tuple[str, str, str, float]
"""Rule, detector, ``at_least`` or ``below``, and the score that it is."""


@dataclass(frozen=True)
class PolicyLabels:
    """What one policy's series are labelled with. ``detectors``: name to kind. ``bounds``: what its rules compare
    scores with."""

    name: str
    hash: str
    rules: Sequence[str]
    detectors: Mapping[str, str]
    bounds: Sequence[Bound] = ()


class Metrics:
    """All series of one proxy process. ``routes`` are the values of that label; ``show`` makes room for policies.

    Raises ``RuntimeError`` when ``PROMETHEUS_MULTIPROC_DIR`` was set too late.
    """

    def __init__(self, routes: Sequence[str]) -> None:
        self.shared = SHARED_FOLDER in os.environ
        if self.shared and not values.ValueClass._multiprocess:
            raise RuntimeError(f"{SHARED_FOLDER} was set when prometheus-client had already been imported")
        self._kinds: dict[tuple[str, str], str] = {}
        self._routes = tuple(routes)
        self._hashes: dict[str, str] = {}
        self._hashes_before: dict[str, str] = {}
        self._stems: set[Stem] = set()
        self._stems_made: set[Stem] = set()
        self._bounds: set[tuple[str, str, str, str]] = set()
        self._found: dict[tuple[Any, ...], Any] = {}
        self.registry = registry = CollectorRegistry()
        self.requests = counter(f.REQUESTS, registry)
        self.rule_hits = counter(f.RULE_HITS, registry)
        self.rule_threshold = gauge(f.RULE_THRESHOLD, registry)
        self.shadow_decisions = counter(f.SHADOW_DECISIONS, registry)
        self.detector_results = counter(f.DETECTOR_RESULTS, registry)
        self.detector_scores = histogram(f.DETECTOR_SCORE, registry)
        self.detector_seconds = histogram(f.DETECTOR_SECONDS, registry)
        self.own = histogram(f.ADDED_LATENCY, registry)
        self.verdict = histogram(f.VERDICT, registry)
        self.stream_held = histogram(f.STREAM_HELD, registry)
        self.second_pass = histogram(f.SECOND_PASS, registry)
        self.window_passes = histogram(f.WINDOW_PASSES, registry)
        self.upstream_first_byte = histogram(f.UPSTREAM_FIRST_BYTE, registry)
        self.upstream = histogram(f.UPSTREAM, registry)
        self.in_flight = gauge(f.IN_FLIGHT, registry)
        self.limit_refusals = counter(f.LIMIT_REFUSALS, registry)
        self.limit_fallbacks = counter(f.LIMIT_FALLBACKS, registry)
        self.malformed = counter(f.MALFORMED, registry)
        self.ledger_entries = counter(f.LEDGER_ENTRIES, registry)
        self.ledger_waiting = gauge(f.LEDGER_WAITING, registry)
        self.policy_info = gauge(f.POLICY_INFO, registry)
        self.policy_in_force = gauge(f.POLICY_IN_FORCE, registry)
        self.policy_loaded = gauge(f.POLICY_LOADED, registry)
        self.policy_reloads = counter(f.POLICY_RELOADS, registry)
        self.keys_in_force = gauge(f.KEYS_IN_FORCE, registry)
        self.keys_in_force.set(1)
        gauge(f.BUILD_INFO, registry).labels(__version__).set(1)
        self._by_policy = (
            (f.REQUESTS, self.requests),
            (f.RULE_HITS, self.rule_hits),
            (f.SHADOW_DECISIONS, self.shadow_decisions),
            (f.DETECTOR_RESULTS, self.detector_results),
            (f.DETECTOR_SCORE, self.detector_scores),
            (f.DETECTOR_SECONDS, self.detector_seconds),
        )
        self._timed = (self.own, self.verdict, self.stream_held, self.second_pass, self.window_passes)
        for route in routes:
            for by_route in (*self._timed, self.upstream_first_byte, self.upstream, self.in_flight):
                by_route.labels(route)
        for scope, limit in product(values_of(f.LIMIT_REFUSALS, "scope"), values_of(f.LIMIT_REFUSALS, "limit")):
            self.limit_refusals.labels(scope, limit)
        for reason in values_of(f.MALFORMED, "reason"):
            self.malformed.labels(reason)
        for result in values_of(f.LEDGER_ENTRIES, "result"):
            self.ledger_entries.labels(result)
        for result in values_of(f.POLICY_RELOADS, "result"):
            self.policy_reloads.labels(result)

    def show(self, policies: Sequence[PolicyLabels], shadows: Sequence[tuple[str, str]] = ()) -> None:
        """Make the series of all policies that may judge from now on, and say which these are. ``shadows``: a policy
        and the one in shadow beside it. Series of the policies just before them stay, since their requests may still
        be under way and Prometheus has not seen the last of them; those of policies before these are dropped."""
        for one in policies:
            self._make_room(one)
        for policy, shadow in shadows:
            for action, would in product(f.HIT_ACTIONS, f.HIT_ACTIONS):
                self.shadow_decisions.labels(policy, shadow, action, would)
        self._drop_others(_stems(policies, shadows))
        self._show_hashes({one.name: one.hash for one in policies})
        self._show_bounds({(one.name, *bound[:3]): bound[3] for one in policies for bound in one.bounds})
        self.policy_loaded.set_to_current_time()
        self.policy_in_force.set(1)

    def _make_room(self, policy: PolicyLabels) -> None:
        outcomes = values_of(f.REQUESTS, "outcome")
        for route, action, outcome in product(self._routes, f.ACTIONS, outcomes):
            self.requests.labels(route, policy.name, action, outcome)
        for rule, action, mode in product(policy.rules, f.HIT_ACTIONS, values_of(f.RULE_HITS, "mode")):
            self.rule_hits.labels(policy.name, rule, action, mode)
        for name, kind in policy.detectors.items():
            self._kinds[policy.name, name] = kind
            self.detector_scores.labels(name, kind)
            self.detector_seconds.labels(name, kind)
            for status in f.STATUSES:
                self.detector_results.labels(name, kind, status)

    def _drop_others(self, stems: set[Stem]) -> None:
        if not self.shared:
            # In files that processes share no series can be taken back.
            for gone in self._stems_made - stems - self._stems:
                for family, metric in self._by_policy:
                    labels = dict(gone)
                    if labels.keys() <= family.labels.keys():
                        metric.remove_by_labels(labels)
            # One of these that is counted again must be made again.
            self._found.clear()
        self._stems_made = stems | self._stems
        self._stems = stems

    def _show_hashes(self, hashes: dict[str, str]) -> None:
        for name, hash_ in self._hashes.items() - hashes.items():
            if self.shared:
                self.policy_info.labels(name, hash_).set(0)
            else:
                self.policy_info.remove(name, hash_)
        for name, hash_ in hashes.items():
            self.policy_info.labels(name, hash_).set(1)
        self._hashes, self._hashes_before = hashes, self._hashes

    def _show_bounds(self, bounds: Mapping[tuple[str, str, str, str], float]) -> None:
        for gone in self._bounds - bounds.keys():
            if self.shared:
                self.rule_threshold.labels(*gone).set(math.nan)
            else:
                self.rule_threshold.remove(*gone)
        for labels, score in bounds.items():
            self.rule_threshold.labels(*labels).set(score)
        self._bounds = set(bounds)

    def count_reload(self, result: Reload) -> None:
        self.policy_reloads.labels(result).inc()
        self.policy_in_force.set(0 if result == "failure" else 1)

    def show_keys(self, in_force: bool) -> None:
        """Whether the file of keys could be used when it was last read."""
        self.keys_in_force.set(in_force)

    def count(self, record: RequestRecord) -> None:
        """Add one finished request."""
        route, answer = record.route, record.answer
        self._series(self.requests, route, record.policy, record.action, record.outcome).inc()
        if record.limit is not None:
            self._series(self.limit_refusals, *record.limit).inc()
        for hit in record.hits:
            self._series(self.rule_hits, record.policy, hit.rule, hit.action, hit.mode).inc()
        for name, score in {**(answer.scores if answer else {}), **record.scores}.items():
            self._count_score(name, self._kinds[record.policy, name], score)
        if record.shadow is not None:
            self._count_shadow(record, record.shadow)
        if record.policy_hash not in (self._hashes.get(record.policy), self._hashes_before.get(record.policy)):
            self._note_late(record)
        if record.decision:
            self._series(self.own, route).observe(record.own_s)
        for by_route, duration_s in (
            (self.verdict, record.verdict_s),
            (self.stream_held, record.held_s),
            (self.second_pass, answer.second_pass_s if answer else None),
            (self.window_passes, record.window_passes_s),
            (self.upstream_first_byte, record.upstream_first_byte_s),
            (self.upstream, record.upstream_s),
        ):
            if duration_s is not None:
                self._series(by_route, route).observe(duration_s)

    def _note_late(self, record: RequestRecord) -> None:
        """It took so long that its policy's series had been dropped, and are back: the next change drops them."""
        names = {**(record.answer.scores if record.answer else {}), **record.scores}
        detectors = {name: self._kinds[record.policy, name] for name in names}
        shadows = [(record.policy, record.shadow.policy)] if record.shadow else []
        rules = [hit.rule for hit in record.hits]
        self._stems_made |= _stems([PolicyLabels(record.policy, record.policy_hash, rules, detectors)], shadows)

    def _count_score(self, name: str, kind: str, score: Score) -> None:
        self._series(self.detector_results, name, kind, status_of(score)).inc()
        if score.value is not None:
            self._series(self.detector_scores, name, kind).observe(score.value)
        if score.took_s is not None:
            self._series(self.detector_seconds, name, kind).observe(score.took_s)

    def _count_shadow(self, record: RequestRecord, shadow: Beside) -> None:
        for hit in record.shadow_hits:
            self._series(self.rule_hits, shadow.policy, hit.rule, hit.action, "shadow").inc()
        self._series(self.shadow_decisions, record.policy, shadow.policy, record.action, record.shadow_action).inc()

    def _series(self, metric: M, *labels: str) -> M:
        """One series, looked for once: for prometheus-client each look costs as much as counting does."""
        key = (metric, *labels)
        found: M | None = self._found.get(key)
        if found is None:
            found = self._found[key] = metric.labels(*labels)
        return found

    def count_entries(self, result: Result, entries: int) -> None:
        self.ledger_entries.labels(result).inc(entries)

    def count_malformed(self, reason: Malformed) -> None:
        self.malformed.labels(reason).inc()

    def exposition(self) -> bytes:
        """What ``/metrics`` answers: of this process, or of all that share the folder."""
        if not self.shared:
            return generate_latest(self.registry)
        return exposition_of(Path(os.environ[SHARED_FOLDER]))


def _stems(policies: Sequence[PolicyLabels], shadows: Sequence[tuple[str, str]]) -> set[Stem]:
    labels = [{"policy": one.name} for one in policies]
    labels += [{"policy": one.name, "rule": rule} for one in policies for rule in one.rules]
    labels += [{"detector": name, "kind": kind} for one in policies for name, kind in one.detectors.items()]
    labels += [{"policy": policy, "shadow": shadow} for policy, shadow in shadows]
    return {frozenset(one.items()) for one in labels}


def status_of(score: Score) -> str:
    """The value of the label ``status``."""
    if score.status != "unavailable":
        return score.status
    return "late" if score.timed_out else "dropped" if score.dropped else "unavailable"
