"""What the aperture tells Prometheus: declared once, counted in the front end, shown under vLLM's own ``/metrics``.

Owns the declarations and how readouts and reports are counted. Everything is counted where readouts are put together,
once a request or readout: never for a token, never by a worker. The series are in prometheus-client's default registry,
as vLLM's are, so they are merged as vLLM's are where it runs several API servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Literal, get_args

from prometheus_client import REGISTRY, CollectorRegistry

from guard.mia.results import (
    AttentionReadout,
    AttentionRowsReadout,
    HiddenMeanReadout,
    HiddenReadout,
    ProbeReadout,
    QKReadout,
    Readout,
    RowsReadout,
    Status,
    SteeringReport,
    size_bytes,
)
from guard.mia.spec import MiaSpec
from guard.telemetry.family import Family, counter, gauge, histogram, values

KINDS = tuple(
    str(one.kind)
    for one in (
        HiddenReadout,
        RowsReadout,
        HiddenMeanReadout,
        ProbeReadout,
        AttentionReadout,
        AttentionRowsReadout,
        QKReadout,
    )
)
SPACES = (
    *("max_host_bytes", "max_shared_bytes", "max_answer_bytes", "max_artifact_bytes"),
    *("max_hidden_rows_per_step", "max_query_rows_per_step"),
)
"""Settings of the engine's that say how much space there is; a reason for dropping something names one."""

Asks = Literal["nothing", "readouts", "steering", "both"]
LAG_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
WAIT_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0)
DOSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)

REQUESTS = Family(
    "mia_requests_total",
    "counter",
    "Prompts given to the engine, each choice of an answer on its own, by what they ask the aperture for.",
    {"asks": get_args(Asks)},
)
REFUSED_SPECS = Family(
    "mia_refused_specs_total", "counter", "Requests that were refused for what they ask the aperture for."
)
READOUTS = Family(
    "mia_readouts_total",
    "counter",
    "Readouts of prompts and of whole answers that were put together; only complete ones have values.",
    {"kind": KINDS, "status": get_args(Status)},
)
DROPPED = Family(
    "mia_dropped_readouts_total",
    "counter",
    "Readouts that were dropped, by the engine's setting that says how much space there is.",
    {"reason": (*SPACES, "other")},
)
CAPTURED_ROWS = Family(
    "mia_captured_rows_total", "counter", "Tokens that complete readouts have values of.", {"kind": KINDS}
)
CAPTURED_BYTES = Family(
    "mia_captured_bytes_total", "counter", "Bytes of the values of complete readouts.", {"kind": KINDS}
)
STEERED_REQUESTS = Family(
    "mia_steered_requests_total", "counter", "Answers that ended of which steering changed at least one token."
)
STEERED_TOKENS = Family(
    "mia_steered_tokens_total",
    "counter",
    "Tokens that steering changed; limited: by less than was asked, for max_relative_dose.",
    {"dose": ("whole", "limited")},
)
STEERING_DOSE = Family(
    "mia_steering_relative_dose",
    "histogram",
    "The largest change that each steering of an answer made, relative to the residual stream's norm there.",
    buckets=DOSE_BUCKETS,
)
GATES = Family(
    "mia_gates_total",
    "counter",
    "Gated steerings of answers that ended: the gate opened, stayed shut, or could not be judged.",
    {"result": ("opened", "shut", "unjudged")},
)
BANK_VECTORS = Family("mia_bank_vectors", "gauge", "Steering vectors that requests may name.", merged="livemax")
BANK_CAPACITY = Family("mia_bank_capacity", "gauge", "Steering vectors that there is room for.", merged="livemax")
QUEUE_WAIT = Family(
    "mia_queue_wait_seconds",
    "histogram",
    "Of prompts that ask for readouts: from reaching the engine to the first step with them.",
    buckets=WAIT_BUCKETS_S,
)
COURIER_LAG = Family(
    "mia_courier_lag_seconds",
    "histogram",
    "From the end of the step that read the last of it to the readout put together in the API server.",
    {"stage": ("prompt", "final")},
    LAG_BUCKETS_S,
)

ENGINE = (
    REQUESTS, REFUSED_SPECS, READOUTS, DROPPED, CAPTURED_ROWS, CAPTURED_BYTES, QUEUE_WAIT, COURIER_LAG,
    STEERED_REQUESTS, STEERED_TOKENS, STEERING_DOSE, GATES, BANK_VECTORS, BANK_CAPACITY,
)  # fmt: skip
"""All, in the order of the page."""


class ApertureMetrics:
    """The series of one front end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = counter(REQUESTS, registry)
        self.refused_specs = counter(REFUSED_SPECS, registry)
        self.readouts = counter(READOUTS, registry)
        self.dropped = counter(DROPPED, registry)
        self.captured_rows = counter(CAPTURED_ROWS, registry)
        self.captured_bytes = counter(CAPTURED_BYTES, registry)
        self.queue_wait = histogram(QUEUE_WAIT, registry)
        self.courier_lag = histogram(COURIER_LAG, registry)
        self.steered_requests = counter(STEERED_REQUESTS, registry)
        self.steered_tokens = counter(STEERED_TOKENS, registry)
        self.dose = histogram(STEERING_DOSE, registry)
        self.gates = counter(GATES, registry)
        self.bank_vectors = gauge(BANK_VECTORS, registry)
        self.bank_capacity = gauge(BANK_CAPACITY, registry)
        for family, series in (
            *((REQUESTS, self.requests), (DROPPED, self.dropped), (GATES, self.gates), (COURIER_LAG, self.courier_lag)),
            *((READOUTS, self.readouts), (CAPTURED_ROWS, self.captured_rows), (CAPTURED_BYTES, self.captured_bytes)),
            (STEERED_TOKENS, self.steered_tokens),
        ):
            for labels in product(*(values(family, label) for label in family.labels)):
                series.labels(*labels)

    def count_request(self, spec: MiaSpec | None) -> None:
        """A prompt, or a choice of its answer, goes to the engine."""
        self.requests.labels(asks_for(spec)).inc()

    def count_readouts(self, items: Iterable[Readout]) -> None:
        """Readouts that have become as complete as they will."""
        for item in items:
            self.readouts.labels(item.kind, item.status).inc()
            if item.status == "complete":
                self.captured_rows.labels(item.kind).inc(_rows(item))
                self.captured_bytes.labels(item.kind).inc(size_bytes(item))
            elif item.status == "dropped":
                self.count_dropped(item.reason)

    def count_dropped(self, reason: str, readouts: int = 1) -> None:
        self.dropped.labels(space_in(reason)).inc(readouts)

    def count_steering(self, spec: MiaSpec, reports: Iterable[SteeringReport]) -> None:
        """What came of each steering of an answer that has ended. reports: in the order of ``spec.steer``; none when no
        step with the request came to an end."""
        steered = False
        for steer, report in zip(spec.steer, reports, strict=False):
            if report.steered_tokens:
                steered = True
                self.steered_tokens.labels("limited").inc(report.limited_tokens)
                self.steered_tokens.labels("whole").inc(report.steered_tokens - report.limited_tokens)
                self.dose.observe(report.relative_dose)
            if steer.gate is not None:
                shut = "unjudged" if report.reason else "shut"
                self.gates.labels("opened" if report.opened_at is not None else shut).inc()
        self.steered_requests.inc(steered)


@cache
def engine_metrics() -> ApertureMetrics:
    """Of this process, in the registry that vLLM shows."""
    return ApertureMetrics(REGISTRY)


def asks_for(spec: MiaSpec | None) -> Asks:
    if spec is None or not spec.asks:
        return "nothing"
    if not spec.steer:
        return "readouts"
    return "both" if spec.captures else "steering"


def space_in(reason: str) -> str:
    """The setting that a reason names, ``other`` where it names none."""
    found = re.search(r"\((max_\w+)\)", reason)
    return found[1] if found and found[1] in SPACES else "other"


def _rows(item: Readout) -> int:
    if isinstance(item, HiddenReadout):
        return int(item.position is not None)
    if isinstance(item, HiddenMeanReadout):
        return int(item.values is not None)
    return len(item.positions)
