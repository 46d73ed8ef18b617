"""The proxy's metrics, each declared once: the contract with dashboards, alerts and everybody else's queries.

Owns names, labels, what bounds their values, and buckets. ``metrics`` counts; ``docs/metrics.md`` is written from this.
"""

from __future__ import annotations

from typing import get_args

from guard.policy.store import Reload
from guard.telemetry.family import Family
from guard.telemetry.ledger import Result
from guard.telemetry.record import LimitKind, LimitScope, Malformed, Outcome

OWN_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
DETECTOR_BUCKETS_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)
ENGINE_BUCKETS_S = (
    *(0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
SCORE_BUCKETS = tuple(step / 20 for step in range(21))

HIT_ACTIONS = ("allow", "flag", "redact", "steer", "retry", "route", "block")
ACTIONS = ("none", *HIT_ACTIONS)
STATUSES = ("scored", "unavailable", "late", "dropped", "not_applicable")
"""What became of a detector's score; ``late`` and ``dropped`` are kinds of ``unavailable`` that have a remedy."""

ROUTE = "the paths that are served, and `other`"
POLICY = "policies that are loaded, and those just before them"
RULE = "their rules"
DETECTOR = "their detectors"
KIND = "kinds of detectors"
DETECTOR_LABELS = {"detector": DETECTOR, "kind": KIND}

REQUESTS = Family(
    "guard_requests_total",
    "counter",
    "Requests that ended, by what was decided and how they ended.",
    {"route": ROUTE, "policy": POLICY, "action": ACTIONS, "outcome": get_args(Outcome)},
)
RULE_HITS = Family(
    "guard_rule_hits_total",
    "counter",
    "Rules that hit, or that could not be judged; mode shadow was not acted upon.",
    {"policy": POLICY, "rule": RULE, "action": HIT_ACTIONS, "mode": ("enforce", "shadow")},
)
SHADOW_DECISIONS = Family(
    "guard_shadow_decisions_total",
    "counter",
    "Decisions of a policy (action) and what the shadow policy beside it would have done (would).",
    {"policy": POLICY, "shadow": POLICY, "action": HIT_ACTIONS, "would": HIT_ACTIONS},
)
DETECTOR_RESULTS = Family(
    "guard_detector_results_total",
    "counter",
    "Results of detectors. Without a score on_error or on_timeout decided: late, it did not come in time; dropped, the "
    "engine had no space for what it reads; unavailable, whatever else. not_applicable: nothing in its scope.",
    {**DETECTOR_LABELS, "status": STATUSES},
)
DETECTOR_SCORE = Family(
    "guard_detector_score",
    "histogram",
    "Scores of detectors; higher is likelier what the detector looks for. Of an answer that is judged several times "
    "while it grows, the highest.",
    DETECTOR_LABELS,
    SCORE_BUCKETS,
)
DETECTOR_SECONDS = Family(
    "guard_detector_seconds",
    "histogram",
    "A detector's own computing for one score, waiting for what it reads left out.",
    DETECTOR_LABELS,
    DETECTOR_BUCKETS_S,
)
RULE_THRESHOLD = Family(
    "guard_rule_threshold",
    "gauge",
    "Scores that the rules of the policies in force compare with; not a number once a rule is gone.",
    {"policy": POLICY, "rule": RULE, "detector": DETECTOR, "bound": ("at_least", "below")},
)
ADDED_LATENCY = Family(
    "guard_added_latency_seconds",
    "histogram",
    "The guard's own work on a request before the answer's first byte, waiting for vLLM left out.",
    {"route": ROUTE},
    OWN_BUCKETS_S,
)
VERDICT = Family(
    "guard_verdict_seconds",
    "histogram",
    "From sending a request upstream to the decision; until then the first byte is held.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
STREAM_HELD = Family(
    "guard_stream_held_seconds",
    "histogram",
    "Of streams that rules judge: the longest time that a part of the answer was kept back for them.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
SECOND_PASS = Family(
    "guard_second_pass_seconds",
    "histogram",
    "How long an answer waited while detectors had the model read about it.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
WINDOW_PASSES = Family(
    "guard_window_passes_seconds",
    "histogram",
    "How long detectors had the model read windows of a prompt once more.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
UPSTREAM_FIRST_BYTE = Family(
    "guard_upstream_first_byte_seconds",
    "histogram",
    "From sending a request upstream to the first byte that came back, readouts included.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
UPSTREAM = Family(
    "guard_upstream_seconds",
    "histogram",
    "From sending a request upstream to the end of its answer, or to its being cut.",
    {"route": ROUTE},
    ENGINE_BUCKETS_S,
)
IN_FLIGHT = Family("guard_requests_in_flight", "gauge", "Requests under way.", {"route": ROUTE}, merged="livesum")
LIMIT_REFUSALS = Family(
    "guard_limit_refusals_total",
    "counter",
    "Requests that a limit refused: of a key, of a tenant, or of everybody together.",
    {"scope": get_args(LimitScope), "limit": get_args(LimitKind)},
)
LIMIT_FALLBACKS = Family(
    "guard_limit_fallbacks_total",
    "counter",
    "Requests with limits that this process counted for itself, since Redis did not answer.",
)
MALFORMED = Family(
    "guard_malformed_requests_total",
    "counter",
    "What came over connections and is no request, so that it is in no other number and has no ledger entry; it is "
    "answered, logged at most once a minute, and the connection closed. not_http: what the parser cannot read; "
    "head_too_large: request line and headers, or too many of them; repeated_header: two of a header that says who "
    "asks, whom, or for what.",
    {"reason": get_args(Malformed)},
)
LEDGER_ENTRIES = Family(
    "guard_ledger_entries_total",
    "counter",
    "Ledger entries: written, delayed (the disk refused; tried again), failed (it refused to the end), dropped (too "
    "many waited).",
    {"result": get_args(Result)},
)
LEDGER_WAITING = Family(
    "guard_ledger_waiting",
    "gauge",
    "Ledger entries that wait to be written, in memory. More than 100,000 do not: those are dropped.",
    merged="livesum",
)
POLICY_INFO = Family(
    "guard_policy_info",
    "gauge",
    "1 for each policy that may judge requests; 0 or gone when another content of it does.",
    {"policy": POLICY, "hash": "SHA-256 of their contents"},
    merged="livemax",
)
POLICY_RELOADS = Family(
    "guard_policy_reloads_total",
    "counter",
    "Changes of policy files: success, failure (the policies before them stay), noop (they say the same).",
    {"result": get_args(Reload)},
)
POLICY_LOADED = Family(
    "guard_policy_loaded_timestamp_seconds",
    "gauge",
    "When the policies that judge now were loaded, in seconds since 1970; of several processes the earliest.",
    merged="livemin",
)
POLICY_IN_FORCE = Family(
    "guard_policy_files_in_force",
    "gauge",
    "1 when the policy files as they are now are what judges; 0 when the last change of them could not be used.",
    merged="livemin",
)
KEYS_IN_FORCE = Family(
    "guard_keys_file_in_force",
    "gauge",
    "1 when the keys in the file as it is now are what counts; 0 when it cannot be used, and those before it count.",
    merged="livemin",
)
BUILD_INFO = Family("guard_build_info", "gauge", "1, with the guard's version.", {"version": "one"}, merged="livemax")

PROXY = (
    REQUESTS, IN_FLIGHT, RULE_HITS, RULE_THRESHOLD, SHADOW_DECISIONS,
    DETECTOR_RESULTS, DETECTOR_SCORE, DETECTOR_SECONDS,
    ADDED_LATENCY, VERDICT, STREAM_HELD, SECOND_PASS, WINDOW_PASSES, UPSTREAM_FIRST_BYTE, UPSTREAM,
    LIMIT_REFUSALS, LIMIT_FALLBACKS, MALFORMED, LEDGER_ENTRIES, LEDGER_WAITING,
    POLICY_INFO, POLICY_IN_FORCE, POLICY_LOADED, POLICY_RELOADS, KEYS_IN_FORCE, BUILD_INFO,
)  # fmt: skip
"""All, in the order of the page."""
