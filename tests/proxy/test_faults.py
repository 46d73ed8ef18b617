"""Engines that are down, slow, silent, garbled or dying, and clients that leave: each with its answer and its entry."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest

from guard.machine import free_port
from guard.mia.results import EVENT_OBJECT
from tests.proxy.conftest import BLOCKED, BODY, IMPATIENT, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@both
@pytest.mark.parametrize("event", ["missing", "garbled", "not_json", "dropped", "empty"])
async def test_no_readouts_is_no_score_and_on_error_decides(proxy: Proxy, event: str, stream: bool) -> None:
    proxy.engine.event, proxy.engine.logit = event, BLOCKED  # type: ignore[assignment]
    status, headers, body = await proxy.post({**BODY, "stream": stream})
    assert (status, headers["x-guard-action"]) == (200, "flag")
    assert b"42" in body
    assert EVENT_OBJECT.encode() not in body
    entry = await proxy.entry()
    assert entry["scores"] == {"danger": None}
    assert entry["detectors"]["danger"].startswith("unavailable: ")
    assert [hit["on_error"] for hit in entry["hits"]] == [True, True, True]
    metrics = (await proxy.get("/metrics"))[2]
    assert b'guard_detector_results_total{detector="danger",kind="probe",status="unavailable"} 1.0' in metrics


@both
async def test_readouts_that_are_late_are_waited_for_a_bounded_time(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(event_delay_s=0.6, logit=BLOCKED)
    async with running(engine), start_proxy(engine, IMPATIENT) as proxy:
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        entry = await proxy.entry()
    assert (status, headers["x-guard-action"]) == (200, "flag")
    assert EVENT_OBJECT.encode() not in body
    assert b'"mia"' not in body
    if not stream:
        assert body == engine.whole()
    assert entry["detectors"]["danger"] == "unavailable: no readouts within 0.3 s"
    assert 300 <= entry["timings_ms"]["verdict"] < 600
    assert entry["timings_ms"]["upstream_first_byte"] is None


@both
async def test_a_rule_that_blocks_on_error_lets_nothing_pass_unmeasured(start_proxy: StartProxy, stream: bool) -> None:
    strict = IMPATIENT.replace("on_error: flag", "on_error: block")
    async with (
        running(FakeEngine(event="missing", answer_delay_s=None)) as engine,
        start_proxy(engine, strict) as proxy,
    ):
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        assert (status, error_of(body)["code"]) == (503, "guard_unavailable")
        assert headers["x-should-retry"] == "false"
        await eventually(lambda: engine.open == 0)
        assert (await proxy.entry())["outcome"] == "guard_unavailable"


async def test_an_engine_without_the_taps_makes_detectors_unavailable_and_still_answers(proxy: Proxy) -> None:
    proxy.engine.refuses_reading = True
    status, headers, body = await proxy.post()
    assert (status, headers["x-guard-action"], body) == (200, "flag", proxy.engine.whole())
    assert proxy.engine.specs[1] is None
    assert "this engine has no such tap" in (await proxy.entry())["detectors"]["danger"]


@both
async def test_errors_of_the_engine_keep_status_body_and_what_clients_act_on(proxy: Proxy, stream: bool) -> None:
    value = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 429}}
    proxy.engine.error = (429, value, {"retry-after": "7", "x-internal": "secret"})
    status, headers, body = await proxy.post({**BODY, "stream": stream})
    assert (status, json.loads(body), headers["retry-after"]) == (429, value, "7")
    assert "x-internal" not in headers
    entry = await proxy.entry()
    assert (entry["outcome"], entry["action"], entry["status"]) == ("upstream_error", "none", 429)


async def test_an_engine_that_fails_after_the_readouts_keeps_its_status(proxy: Proxy) -> None:
    proxy.engine.later_error = 500
    status, _, body = await proxy.post()
    assert (status, body) == (500, b'{"error":"engine died"}')
    assert (await proxy.entry())["outcome"] == "upstream_error"


@both
async def test_an_engine_that_is_down_is_a_502_and_its_return_is_noticed(start_proxy: StartProxy, stream: bool) -> None:
    port = free_port()
    async with start_proxy(FakeEngine(url=f"http://127.0.0.1:{port}")) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, error_of(body)["code"]) == (502, "upstream_unavailable")
        assert str(port) not in body.decode()
        assert (await proxy.get("/readyz"))[0] == 503
        async with running(FakeEngine(), port):
            assert (await proxy.post({**BODY, "stream": stream}))[0] == 200
            assert (await proxy.get("/readyz"))[0] == 200
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 502
        outcomes = [entry["outcome"] for entry in await proxy.entries(3)]
        assert outcomes == ["upstream_unavailable", "completed", "upstream_unavailable"]


async def test_an_engine_that_does_not_accept_is_a_503(start_proxy: StartProxy) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        async with start_proxy(FakeEngine(url=f"http://127.0.0.1:{port}"), connect_timeout_s=0.2) as proxy:
            status, _, body = await proxy.post()
            assert (status, error_of(body)["code"]) == (503, "upstream_unavailable")
        for filler in fillers:
            filler.close()


async def test_an_engine_that_falls_silent_is_a_504_and_its_request_is_closed(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(answer_delay_s=None)) as engine, start_proxy(engine, read_timeout_s=0.2) as proxy:
        status, _, body = await proxy.post()
        assert (status, error_of(body)["code"]) == (504, "upstream_unavailable")
        await eventually(lambda: engine.open == 0)


async def test_a_whole_answer_that_breaks_off_is_a_502(proxy: Proxy) -> None:
    proxy.engine.break_after_words = 0
    status, _, body = await proxy.post()
    assert (status, error_of(body)["code"]) == (502, "upstream_unavailable")


async def test_an_answer_that_cannot_be_read_is_a_502(proxy: Proxy) -> None:
    proxy.engine.garbled_envelope = True
    status, _, body = await proxy.post()
    assert (status, error_of(body)["code"]) == (502, "upstream_unavailable")


@pytest.mark.parametrize("fault", [{"break_after_words": 2}, {"leave_out_done": True}])
async def test_a_stream_that_breaks_off_ends_with_an_error_never_silently(proxy: Proxy, fault: dict[str, Any]) -> None:
    for name, value in fault.items():
        setattr(proxy.engine, name, value)
    client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused")
    stream = await client.chat.completions.create(**STREAM)
    words = [(await anext(stream)).choices[0].delta.content for _ in range(2)]

    async def read_on() -> None:
        async for chunk in stream:
            words.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError, match=r"broke off|closed the connection"):
        await read_on()
    assert words[:2] == ["The", " answer"]
    entry = await proxy.entry()
    assert (entry["outcome"], entry["status"], entry["error_code"]) == ("upstream_broken", 200, "upstream_unavailable")


async def test_a_stream_that_dies_before_its_first_frame_is_a_502(proxy: Proxy) -> None:
    proxy.engine.break_after_words = 0
    assert (await proxy.post(STREAM))[0] == 502


PHASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "before the readouts": (BODY, {"event_delay_s": None}),
    "before the readouts, streamed": (STREAM, {"event_delay_s": None}),
    "before the answer": (BODY, {"answer_delay_s": None}),
    "in mid-stream": (STREAM, {"answer_delay_s": None}),
    "while steering": (BODY, {"logit": 1.5, "answer_delay_s": None}),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_ends_the_engines_request(proxy: Proxy, phase: str) -> None:
    body, behaviour = PHASES[phase]
    for name, value in behaviour.items():
        setattr(proxy.engine, name, value)
    asking = asyncio.create_task(proxy.post(body))
    await eventually(lambda: len(proxy.engine.bodies) == (2 if phase == "while steering" else 1))
    await asyncio.sleep(0.05)
    asking.cancel()
    await eventually(lambda: proxy.engine.open == 0, limit_s=1)
    entry = await proxy.entry()
    assert entry["outcome"] == "client_gone"
    assert entry["status"] == (200 if phase == "in mid-stream" else None)


async def test_a_client_that_leaves_while_it_sends_is_recorded(proxy: Proxy) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    writer.write(b'content-length: 100\r\n\r\n{"model"')
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    assert (await proxy.entry())["outcome"] == "client_gone"
    assert not proxy.engine.bodies


async def test_a_client_that_never_ends_its_body_is_refused(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, body_timeout_s=0.1) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()


async def test_requests_under_way_when_the_proxy_stops_are_told_and_recorded(start_proxy: StartProxy) -> None:
    engine = FakeEngine(answer_delay_s=None)
    async with running(engine):
        async with start_proxy(engine) as proxy:
            whole = asyncio.create_task(proxy.post(BODY))
            streamed = asyncio.create_task(proxy.post(STREAM))
            await eventually(lambda: engine.open == 2)
            await asyncio.sleep(0.1)
        status, headers, body = await whole
        assert (status, error_of(body)["code"]) == (503, "stopping")
        assert headers["retry-after"] == "1"
        _, _, body = await streamed
        assert b"The" in body
        assert error_of(body.strip().rsplit(b"data: ", 1)[1])["code"] == "stopping"
        assert [entry["outcome"] for entry in await proxy.entries(2)] == ["stopped", "stopped"]


async def test_many_requests_of_every_kind_leave_no_connection_and_no_gap_in_the_ledger(proxy: Proxy) -> None:
    async def one(i: int) -> None:
        body = {**BODY, "stream": i % 2 == 0}
        if i % 5 == 0:
            task = asyncio.create_task(proxy.post({**body, "max_tokens": i}))
            await eventually(lambda: any(seen.get("max_tokens") == i for seen in proxy.engine.bodies), limit_s=20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif i % 7 == 0:
            await proxy.post({**body, "messages": []})
        else:
            await proxy.post(body)

    proxy.engine.word_delay_s = 0.01
    await asyncio.gather(*(one(i) for i in range(60)))
    await eventually(lambda: proxy.engine.open == 0)
    entries = await proxy.entries(60)
    assert len({entry["request_id"] for entry in entries}) == 60
    assert b'guard_requests_in_flight{route="/v1/chat/completions"} 0.0' in (await proxy.get("/metrics"))[2]


async def test_a_fault_of_the_proxy_is_a_500_whose_log_quotes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(BODY["messages"][0]["content"])

    monkeypatch.setattr("guard.proxy.chat.parse_request", fail)
    status, _, body = await proxy.post()
    assert (status, error_of(body)["code"]) == (500, "internal_error")
    assert "RuntimeError" in caplog.text
    assert "private words" not in caplog.text + body.decode()
    assert (await proxy.entry())["outcome"] == "internal_error"


async def test_the_proxys_connections_to_the_engine_are_reused(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = 0
    connect: Callable[..., Any] = aiohttp.TCPConnector._create_connection

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal opened
        opened += 1
        return await connect(*args, **kwargs)

    async with aiohttp.ClientSession() as session:
        await (await session.post(f"{proxy.url}/v1/chat/completions", json=BODY)).read()
        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", counted)
        for stream in (True, False, True, False):
            answer = await session.post(f"{proxy.url}/v1/chat/completions", json={**BODY, "stream": stream})
            await answer.read()
    assert opened == 0
