"""Traces as a collector gets them: real OTLP over HTTP, decoded."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from guard.policy import Decision
from guard.proxy.services import Services
from guard.settings import Settings, SettingsError, load_settings
from guard.telemetry import tracing
from guard.telemetry.tracing import decision_type
from tests.proxy.conftest import BLOCKED, BODY, FLAGGED, POLICY, STEERED, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_answers import DRIFTING, RETRY
from tests.proxy.test_streaming import LEAK

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}
PRIVATE = (b"private words", b"answer is 42")


@dataclass
class Collector:
    """``hangs``: it takes what it gets and does not answer until the test is over."""

    hangs: bool = False
    url: str = ""
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def traces(self, request: web.Request) -> web.Response:
        self.raw.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.asked.set()
        if self.hangs:
            await self.over.wait()
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    @property
    def resources(self) -> list[dict[str, Any]]:
        return [values(one.resource.attributes) for raw in self.raw for one in _parsed(raw).resource_spans]

    @property
    def spans(self) -> dict[str, Span]:
        """By name; of several the last."""
        return {span.name: span for span in self.all_spans}

    @property
    def all_spans(self) -> list[Span]:
        return [
            span
            for raw in self.raw
            for resource in _parsed(raw).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _parsed(raw: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(raw)


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in attributes}


@asynccontextmanager
async def collecting(collector: Collector) -> AsyncIterator[Collector]:
    app = web.Application()
    app.router.add_post("/v1/traces", collector.traces)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        collector.over.set()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


async def traced(
    start_proxy: StartProxy, engine: FakeEngine, policy: str = POLICY, headers: dict[str, str] | None = None
) -> Collector:
    """The spans of one request, sent when the proxy stops at the latest."""
    async with collecting(Collector()) as collector, running(engine):
        async with start_proxy(engine, policy, otlp_endpoint=collector.url) as proxy:
            await proxy.post(headers=headers)
        return collector


async def test_a_request_is_a_span_in_the_clients_trace_and_the_engine_gets_it_as_its_parent(
    start_proxy: StartProxy,
) -> None:
    engine = FakeEngine()
    collector = await traced(start_proxy, engine, headers=SAMPLED)
    spans = collector.spans
    assert spans.keys() == {"chat tiny", "upstream", "apply_guardrail mia-guard llm_input", "detector danger"}
    request = spans["chat tiny"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.kind == Span.SPAN_KIND_SERVER
    assert engine.headers[0]["traceparent"] == f"00-{TRACE}-{request.span_id.hex()}-01"
    assert engine.headers[0]["tracestate"] == "vendor=opaque"
    guardrail = spans["apply_guardrail mia-guard llm_input"]
    assert spans["upstream"].parent_span_id == guardrail.parent_span_id == request.span_id
    assert spans["detector danger"].parent_span_id == guardrail.span_id
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    for span in spans.values():
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        # Durations and the start are of two clocks, which are read a moment apart.
        assert span.end_time_unix_nano <= request.end_time_unix_nano + 5_000_000


async def test_spans_say_what_was_asked_decided_and_measured_and_no_text(start_proxy: StartProxy) -> None:
    collector = await traced(start_proxy, FakeEngine(logit=FLAGGED))
    request = values(collector.spans["chat tiny"].attributes)
    assert request["gen_ai.operation.name"] == "chat"
    assert (request["gen_ai.request.model"], request["gen_ai.usage.input_tokens"]) == ("tiny", 7)
    assert (request["http.route"], request["http.response.status_code"]) == ("/v1/chat/completions", 200)
    assert (request["guard.action"], request["guard.outcome"]) == ("flag", "completed")
    guardrail = collector.spans["apply_guardrail mia-guard llm_input"]
    told = values(guardrail.attributes)
    assert told["gen_ai.security.decision.type"] == "warn"
    assert (told["gen_ai.security.decision.code"], told["gen_ai.security.policy.name"]) == ("watch", "test")
    assert [values(event.attributes)["gen_ai.security.policy.rule.id"] for event in guardrail.events] == ["watch"]
    detector = values(collector.spans["detector danger"].attributes)
    assert detector["guard.detector.status"] == "scored"
    assert detector["guard.detector.score"] == pytest.approx(0.62, abs=0.01)
    assert collector.resources[0]["service.name"] == "mia-guard"
    assert not any(text in raw for text in PRIVATE for raw in collector.raw)


ANSWER = b'{"id":"1","object":"chat.completion","model":"served-name","choices":[]}'
LENIENT = DRIFTING.replace("on_error: block", "on_error: flag")
FRAMES = [b'data: {"model":"served-name","choices":[{"index":0,"delta":{"content":"x"}}]}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("policy", [POLICY, LENIENT], ids=["prompt", "answer"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_span_names_who_serves_the_model_and_what_the_answer_calls_it(
    start_proxy: StartProxy, stream: bool, policy: str
) -> None:
    engine = FakeEngine(body=ANSWER, frames=FRAMES)
    async with (
        collecting(Collector()) as collector,
        running(engine),
        start_proxy(engine, policy, otlp_endpoint=collector.url) as proxy,
    ):
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 200
        assert (await proxy.post({"model": "tiny"}))[0] == 400
    request = values(collector.spans["chat tiny"].attributes)
    assert (request["gen_ai.provider.name"], request["gen_ai.response.model"]) == ("vllm", "served-name")
    refused = values(collector.spans["POST /v1/chat/completions"].attributes)
    assert refused["gen_ai.provider.name"] == "mia-guard"
    assert "gen_ai.response.model" not in refused


async def test_a_name_that_is_no_unicode_costs_nobody_a_trace(start_proxy: StartProxy) -> None:
    engine = FakeEngine(body=ANSWER.replace(b"served-name", b"\\ud800s"))
    async with (
        collecting(Collector()) as collector,
        running(engine),
        start_proxy(engine, otlp_endpoint=collector.url) as proxy,
    ):
        for model in ("tiny", "\ud800z", "tiny"):
            await proxy.post({**BODY, "model": model})
    # What is collected is what came in the end: all of them, or none.
    assert {"chat tiny", "chat \\ud800z"} <= collector.spans.keys()
    assert values(collector.spans["chat tiny"].attributes)["gen_ai.response.model"] == "\\ud800s"


@pytest.mark.parametrize(
    ("logit", "decision", "outcome"), [(BLOCKED, "deny", "blocked"), (STEERED, "modify", "completed")]
)
async def test_a_block_is_deny_and_no_error_and_steering_is_modify(
    start_proxy: StartProxy, logit: float, decision: str, outcome: str
) -> None:
    collector = await traced(start_proxy, FakeEngine(logit=logit))
    request = collector.spans["chat tiny"]
    told = values(collector.spans["apply_guardrail mia-guard llm_input"].attributes)
    assert (told["gen_ai.security.decision.type"], values(request.attributes)["guard.outcome"]) == (decision, outcome)
    assert request.status.code == Status.STATUS_CODE_UNSET


async def test_a_decision_on_the_answer_is_a_span_of_its_own(start_proxy: StartProxy) -> None:
    collector = await traced(start_proxy, FakeEngine(final_logits=[3.0]), DRIFTING)
    told = values(collector.spans["apply_guardrail mia-guard llm_output"].attributes)
    assert (told["gen_ai.security.decision.type"], told["gen_ai.security.decision.code"]) == ("deny", "drifted")
    assert "detector drift" in collector.spans


async def test_an_answer_that_was_asked_for_anew_has_a_span_for_each_decision(start_proxy: StartProxy) -> None:
    collector = await traced(start_proxy, FakeEngine(scripts=[LEAK, ("fine",)]), RETRY)
    assert values(collector.spans["chat tiny"].attributes)["guard.action"] == "retry"
    judged = [span for span in collector.all_spans if span.name == "apply_guardrail mia-guard llm_output"]
    assert [values(one.attributes)["guard.action"] for one in judged] == ["retry", "allow"]


async def test_an_engine_that_is_down_is_an_error_with_its_code(start_proxy: StartProxy) -> None:
    async with collecting(Collector()) as collector:
        gone = FakeEngine(url="http://127.0.0.1:9")
        async with start_proxy(gone, otlp_endpoint=collector.url) as proxy:
            status, _, _ = await proxy.post()
            assert status == 502
    request = collector.spans["chat tiny"]
    assert request.status.code == Status.STATUS_CODE_ERROR
    assert values(request.attributes)["error.type"] == "upstream_unavailable"


async def test_a_trace_that_the_client_does_not_want_sampled_is_not_and_still_goes_on(start_proxy: StartProxy) -> None:
    engine = FakeEngine()
    collector = await traced(start_proxy, engine, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert collector.raw == []
    assert engine.headers[0]["traceparent"].startswith(f"00-{TRACE}-")
    assert engine.headers[0]["traceparent"].endswith("-00")


@pytest.mark.parametrize("given", ["garbage", "00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-{PARENT}-01\u00e4"])
async def test_a_context_that_is_none_begins_a_new_trace(start_proxy: StartProxy, given: str) -> None:
    engine = FakeEngine()
    collector = await traced(start_proxy, engine, headers={"traceparent": given})
    request = collector.spans["chat tiny"]
    assert (request.parent_span_id, len(request.trace_id)) == (b"", 16)
    version, trace, parent, flags = engine.headers[0]["traceparent"].split("-")
    assert (version, trace, parent) == ("00", request.trace_id.hex(), request.span_id.hex())
    assert int(flags, 16) & 1


async def test_other_routes_and_methods_have_spans_with_bounded_names(start_proxy: StartProxy) -> None:
    async with (
        collecting(Collector()) as collector,
        running(FakeEngine()) as engine,
        start_proxy(engine, otlp_endpoint=f"{collector.url}/v1/traces") as proxy,
    ):
        await proxy.get("/v1/models")
        await proxy.get("/private words")
    assert collector.spans.keys() == {"GET /v1/models", "GET other"}
    assert not any(b"private" in raw for raw in collector.raw)


async def test_a_collector_that_hangs_costs_no_request_anything_and_no_stop_more_than_a_moment(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(tracing, "LAST_SPANS_S", 0.2)
    async with collecting(Collector(hangs=True)) as collector, running(FakeEngine()) as engine:
        async with start_proxy(engine, otlp_endpoint=collector.url) as proxy:
            await proxy.post()
            await asyncio.wait_for(collector.asked.wait(), 20)
            for _ in range(20):
                assert (await proxy.post())[0] == 200
            stopping_s = time.monotonic()
        # The exporter itself would wait ten minutes, and the SDK half of one.
        assert time.monotonic() - stopping_s < 20


async def test_headers_for_the_collector_come_from_the_standard_variable(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "guard-eu")
    collector = await traced(start_proxy, FakeEngine())
    assert collector.headers[0]["authorization"] == "Bearer abc"
    assert collector.resources[0]["service.name"] == "guard-eu"


def test_without_the_sdk_the_start_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    settings = Settings(otlp_endpoint="http://127.0.0.1:4318", ledger=tmp_path / "ledger.jsonl")
    with pytest.raises(SettingsError, match=r"GUARD_OTLP_ENDPOINT.*mia-guard\[otlp\]"):
        Services(settings)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(SettingsError, match="GUARD_OTLP_ENDPOINT"):
        load_settings(otlp_endpoint="collector:4318")


@pytest.mark.parametrize(
    ("action", "would", "shadow", "expected"),
    [
        ("allow", "allow", False, "allow"),
        ("allow", "block", False, "audit"),
        ("flag", "flag", False, "warn"),
        ("redact", "redact", False, "modify"),
        ("route", "route", False, "modify"),
        ("block", "block", False, "deny"),
        ("block", "block", True, "audit"),
        ("allow", "allow", True, "allow"),
    ],
)
def test_each_action_is_one_of_the_five_decisions(action: Any, would: Any, shadow: bool, expected: str) -> None:
    assert decision_type(Decision(action, None, "", "", (), (), (), would), shadow=shadow) == expected
