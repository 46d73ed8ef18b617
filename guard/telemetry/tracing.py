"""Traces: a span for each request, and inside it for what the engine did, each decision, and each detector.

Sent as OTLP over HTTP by OpenTelemetry's SDK, from a thread of its own; a collector that is slow or away costs spans
and nothing else. Of the GenAI conventions (status Development) come ``gen_ai.operation.name``,
``gen_ai.provider.name``, ``gen_ai.usage.*``, ``gen_ai.request.model`` and ``gen_ai.response.model``. For guardrails
there is no adopted convention: ``apply_guardrail`` and ``gen_ai.security.*`` are those of
open-telemetry/semantic-conventions#3233, a proposal.

Owns names and attributes of spans, and the trace context that goes on to vLLM. Holds no text of a prompt or an answer.
Needs ``mia-guard[otlp]`` where it is used, and imports nothing of it elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from detectors.base import Score
from guard import __version__
from guard.policy import Decision
from guard.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

SERVICE = "mia-guard"
CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context."""

OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""``gen_ai.operation.name`` by route."""

DECISIONS: Mapping[str, str] = {
    "allow": "allow",
    "flag": "warn",
    "redact": "modify",
    "steer": "modify",
    "retry": "modify",
    "route": "modify",
    "block": "deny",
}
"""``gen_ai.security.decision.type`` by action; ``audit`` where only a rule in shadow would have acted."""

FAILED = ("internal_error", "guard_unavailable", "upstream_error", "upstream_unavailable", "upstream_broken")
"""Outcomes that are errors. A block is none: the guard did what it is for."""

METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))
LAST_SPANS_S = 3.0
"""How long the end of the proxy waits for the last spans to be sent."""


class TracingError(ValueError):
    """Tracing is wanted and cannot be had; the message says what to install."""


@dataclass(frozen=True)
class Trace:
    """One request's span while it is under way. ``headers``: the context for whoever is asked meanwhile."""

    span: Span
    headers: Mapping[str, str]


class Tracing:
    """``endpoint``: base URL of an OTLP/HTTP collector; None: there are no traces, and clients' contexts pass as they
    are. The standard variables of OpenTelemetry's SDK count as well (``OTEL_EXPORTER_OTLP_HEADERS``,
    ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, …). Raises ``TracingError``."""

    def __init__(self, endpoint: str | None) -> None:
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        if endpoint is not None:
            self._provider = _provider(endpoint)
            self._tracer = self._provider.get_tracer(SERVICE, __version__)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """To its end, when spans that wait are sent, within a bounded time."""
        try:
            yield
        finally:
            if self._provider is not None:
                # A thread that nobody waits for at the end: the collector may never answer.
                ending = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
                ending.start()
                await asyncio.to_thread(ending.join, LAST_SPANS_S)

    def begin(self, record: RequestRecord, method: str, headers: Mapping[str, str]) -> Trace | None:
        """``headers``: the client's; a context among them is this span's parent, and whether it is sampled counts."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        given = {name: headers[name] for name in CONTEXT_HEADERS if name in headers}
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method if method in METHODS else "_OTHER",
            "http.route": record.route,
            "guard.request_id": record.request_id,
        }
        if operation := OPERATIONS.get(record.route):
            attributes["gen_ai.operation.name"] = operation
        span = self._tracer.start_span(
            f"{method if method in METHODS else 'HTTP'} {record.route}",
            propagator.extract(given),
            SpanKind.SERVER,
            attributes,
            start_time=_Clock(record).at(record.started_s),
        )
        passed: dict[str, str] = {}
        propagator.inject(passed, set_span_in_context(span))
        return Trace(span, passed)

    def end(self, trace: Trace | None, record: RequestRecord) -> None:
        """The span, and those inside it. They are put into a queue, and dropped where that is full."""
        if trace is None or self._tracer is None:
            return
        if trace.span.is_recording():
            _Spans(self._tracer, trace.span, record).make()
        trace.span.end()


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise TracingError("traces need OpenTelemetry's SDK: pip install 'mia-guard[otlp]'") from None
    own: dict[str, AttributeValue] = {SERVICE_VERSION: __version__}
    if not os.environ.get(OTEL_SERVICE_NAME):
        own[SERVICE_NAME] = SERVICE
    provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class _Clock:
    """From seconds of ``time.perf_counter`` to nanoseconds since 1970, by when the request came."""

    def __init__(self, record: RequestRecord) -> None:
        self._started_s = record.started_s
        self._started_ns = int(record.started_at.timestamp() * 1e9)

    def at(self, time_s: float) -> int:
        return self._started_ns + int((time_s - self._started_s) * 1e9)


class _Spans:
    """What is told of one request that has ended."""

    def __init__(self, tracer: Tracer, span: Span, record: RequestRecord) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracer, self._span, self._record = tracer, span, record
        self._inside = set_span_in_context(span)
        self._clock = _Clock(record)
        self._end_s = record.started_s + (record.total_s or 0.0)

    def make(self) -> None:
        record = self._record
        self._tell_request()
        if record.sent_s is not None:
            self._upstream(record.sent_s)
        began_s = record.began_s if record.began_s is not None else record.started_s
        decided_s = record.decided_s if record.decided_s is not None else self._end_s
        if record.decision is not None:
            one = _Judged(record.policy, record.policy_hash, record.decision, record.scores, record.measured)
            self._judged(one, "llm_input", began_s, decided_s)
        if (beside := record.shadow) is not None:
            one = _Judged(beside.policy, beside.policy_hash, beside.decision, beside.scores, beside.measured)
            self._judged(one, "llm_input", began_s, decided_s, shadow=True)
        for answer in record.answers:
            one = _Judged(record.policy, record.policy_hash, answer.decision, answer.scores, record.measured)
            self._judged(one, "llm_output", decided_s, self._end_s)
            if (would := answer.shadow) is not None and beside is not None:
                one = _Judged(beside.policy, beside.policy_hash, would.decision, would.scores, beside.measured)
                self._judged(one, "llm_output", decided_s, self._end_s, shadow=True)

    def _tell_request(self) -> None:
        from opentelemetry.trace import StatusCode

        record, span = self._record, self._span
        model = record.model_told
        if model is not None and (operation := OPERATIONS.get(record.route)):
            span.update_name(_utf8(f"{operation} {model}"))
        told: dict[str, AttributeValue | None] = {
            # Required beside an operation; where nobody was asked, the guard gave the answer.
            "gen_ai.provider.name": (record.provider or SERVICE) if record.route in OPERATIONS else record.provider,
            "gen_ai.request.model": model,
            "gen_ai.response.model": record.answered_by,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.generated_tokens,
            "http.response.status_code": record.status,
            "guard.policy": record.policy,
            "guard.action": record.action,
            "guard.outcome": record.outcome,
            "guard.assignment": record.assignment,
            "guard.key": record.key,
            "guard.tenant": record.tenant,
            "guard.added_ms": round(record.own_s * 1000, 3),
        }
        if record.outcome in FAILED:
            told["error.type"] = record.error_code or record.outcome
            span.set_status(StatusCode.ERROR)
        span.set_attributes(_there(told))

    def _upstream(self, sent_s: float) -> None:
        """All that was asked of the model server; its own spans lie beside this one."""
        from opentelemetry.trace import SpanKind

        record = self._record
        span = self._tracer.start_span("upstream", self._inside, SpanKind.CLIENT, start_time=self._clock.at(sent_s))
        if record.upstream_first_byte_s is not None:
            span.add_event("first byte", timestamp=self._clock.at(sent_s + record.upstream_first_byte_s))
        end_s = self._end_s if record.upstream_s is None else sent_s + record.upstream_s
        span.end(self._clock.at(end_s))

    def _judged(self, one: _Judged, target: str, start_s: float, end_s: float, *, shadow: bool = False) -> None:
        """A decision, from when the policy had something to judge; its detectors inside it."""
        from opentelemetry.trace import set_span_in_context

        decision, start, end = one.decision, self._clock.at(start_s), self._clock.at(end_s)
        told: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": "apply_guardrail",
            "gen_ai.guardian.name": SERVICE,
            "gen_ai.guardian.version": __version__,
            "gen_ai.security.target.type": target,
            "gen_ai.security.decision.type": decision_type(decision, shadow=shadow),
            "gen_ai.security.decision.code": decision.rule,
            "gen_ai.security.decision.reason": decision.reason or None,
            "gen_ai.security.policy.id": one.policy_hash,
            "gen_ai.security.policy.name": one.policy,
            "gen_ai.security.policy.version": one.policy_hash[:12],
            "guard.action": decision.action,
            "guard.would": decision.would,
            "guard.shadow": shadow,
        }
        name = f"apply_guardrail {SERVICE} {target}"
        span = self._tracer.start_span(name, self._inside, attributes=_there(told), start_time=start)
        for hit in decision.hits:
            finding: dict[str, AttributeValue | None] = {
                "gen_ai.security.policy.rule.id": hit.rule,
                "guard.action": hit.action,
                "guard.mode": hit.mode,
                "guard.on_error": hit.on_error,
                "guard.reason": hit.reason,
            }
            span.add_event("gen_ai.security.finding", _there(finding), end)
        inside = set_span_in_context(span)
        for detector, score in one.scores.items():
            attributes = _there(
                {
                    "guard.detector": detector,
                    "guard.detector.status": score.status,
                    "guard.detector.score": score.value,
                    "guard.detector.reason": score.reason or None,
                    "guard.detector.timed_out": score.timed_out,
                    "guard.detector.measured": one.measured.get(detector),
                }
            )
            made = self._tracer.start_span(f"detector {detector}", inside, attributes=attributes, start_time=start)
            made.end(end)
        span.end(end)


@dataclass(frozen=True)
class _Judged:
    """One policy's decision and what it rests on."""

    policy: str
    policy_hash: str
    decision: Decision
    scores: Mapping[str, Score]
    measured: Mapping[str, str]


def decision_type(decision: Decision, *, shadow: bool = False) -> str:
    """``gen_ai.security.decision.type``. Of a policy in shadow everything but ``allow`` is ``audit``."""
    if shadow:
        return "allow" if decision.action == "allow" else "audit"
    return "audit" if decision.action == "allow" != decision.would else DECISIONS[decision.action]


def _there(values: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {
        name: _utf8(value) if isinstance(value, str) else value for name, value in values.items() if value is not None
    }


def _utf8(text: str) -> str:
    """Halves of surrogate pairs, which JSON can spell, as escapes: one of them, and a whole batch of spans is lost."""
    return text.encode("utf-8", "backslashreplace").decode()
