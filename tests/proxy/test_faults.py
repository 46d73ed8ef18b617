"""Engines that are down, slow, silent, garbled or dying, and clients that leave: each with its answer and its entry."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from guard.machine import free_port
from guard.mia.results import EVENT_OBJECT
from guard.proxy.keys import Limits, NewKey, create_key
from tests.proxy.conftest import BLOCKED, BODY, IMPATIENT, POLICY, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, process, running

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def raw_request(body: dict[str, Any]) -> bytes:
    """A request as it is on the wire."""
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


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
    status_ = b"dropped" if event == "dropped" else b"unavailable"
    assert b'guard_detector_results_total{detector="danger",kind="probe",status="' + status_ + b'"} 1.0' in metrics


@both
async def test_readouts_that_are_late_are_waited_for_a_bounded_time(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(event_delay_s=4, logit=BLOCKED)
    async with running(engine), start_proxy(engine, IMPATIENT) as proxy:
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        entry = await proxy.entry()
    assert (status, headers["x-guard-action"]) == (200, "flag")
    assert EVENT_OBJECT.encode() not in body
    assert b'"mia"' not in body
    if not stream:
        assert body == engine.whole()
    assert entry["detectors"]["danger"] == "unavailable: no readouts within 0.3 s"
    assert 300 <= entry["timings_ms"]["verdict"] < 4000
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


async def test_a_client_that_takes_nothing_is_left_and_its_request_closed(start_proxy: StartProxy) -> None:
    """Among others that read: eight that send and never look, and none of them costs the rest anything."""
    flood = FakeEngine(scripts=[("x" * 200_000,) * 60], word_delay_s=0.001)
    async with running(flood) as engine, start_proxy(engine, client_timeout_s=0.5) as proxy:
        stuck = [await asyncio.open_connection("127.0.0.1", proxy.port, limit=1024) for _ in range(8)]
        for _, writer in stuck:
            writer.write(raw_request(STREAM))
        await eventually(lambda: engine.open == 8)
        status, _, body = await proxy.post(STREAM)
        assert (status, body.endswith(b"data: [DONE]\n\n")) == (200, True)
        await eventually(lambda: engine.open == 0, limit_s=20)
        outcomes = Counter(entry["outcome"] for entry in await proxy.entries(9))
        assert outcomes == {"client_gone": 8, "completed": 1}
        for _, writer in stuck:
            writer.transport.abort()


async def test_a_client_that_reads_slowly_gets_all_of_its_answer(start_proxy: StartProxy) -> None:
    engine = FakeEngine(scripts=[("x" * 100_000,) * 60])
    async with running(engine), start_proxy(engine, client_timeout_s=1.0) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port, limit=65_536)
        writer.write(raw_request(STREAM))
        size, piece, began_s = 0, b"", time.monotonic()
        while not piece.endswith(b"0\r\n\r\n"):
            piece = await reader.read(400_000)
            size += len(piece)
            await asyncio.sleep(0.1)
        assert size > 6_000_000
        assert time.monotonic() - began_s > 1.2
        writer.close()
        assert (await proxy.entry())["outcome"] == "completed"


async def test_a_client_that_closes_its_side_when_it_has_asked_counts_as_gone(proxy: Proxy) -> None:
    """A half-closed connection: nothing tells it from a client that leaves."""
    proxy.engine.answer_delay_s = None
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(raw_request(STREAM))
    assert b" 200 " in await reader.readline()
    writer.write_eof()
    await eventually(lambda: proxy.engine.open == 0)
    assert (await proxy.entry())["outcome"] == "client_gone"
    writer.close()


async def test_a_stream_of_the_engine_that_is_half_closed_ends_with_an_error(start_proxy: StartProxy) -> None:
    """vLLM's side is shut in an orderly way: in a frame, between two, and before the first."""
    both_frames, port = b"".join(FakeEngine().frame(word) for word in ("one", " two")), free_port()
    parts = [(both_frames[:-9], 200), (both_frames, 200), (b"", 502), (b"data: {", 502)]
    left = [part for part, _ in parts]
    async with start_proxy(FakeEngine(url=f"http://127.0.0.1:{port}")) as proxy:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            writer.write(head + left.pop(0))
            await writer.drain()
            writer.write_eof()
            await reader.read()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", port):
            for _, status in parts:
                got, _, body = await proxy.post(STREAM)
                assert got == status
                assert error_of(body.strip().rsplit(b"data: ", 1)[-1])["code"] == "upstream_unavailable"
        assert [entry["outcome"] for entry in await proxy.entries(4)] == ["upstream_broken"] * 2 + [
            "upstream_unavailable"
        ] * 2


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


async def test_an_engine_that_dies_under_load_and_comes_back_costs_answers_and_no_entry(
    start_proxy: StartProxy,
) -> None:
    port, asked, ended = free_port(), 0, asyncio.Event()
    answers: Counter[str] = Counter()

    async def client(proxy: Proxy, number: int) -> None:
        nonlocal asked
        stream = number % 2 == 0
        while not ended.is_set():
            asked += 1
            status, _, body = await proxy.post({**BODY, "stream": stream})
            broke = status == 200 and stream and not body.endswith(b"data: [DONE]\n\n")
            if broke:
                assert error_of(body.strip().rsplit(b"data: ", 1)[1])["code"] == "upstream_unavailable"
            answers["upstream_broken" if broke else "completed" if status == 200 else "upstream_unavailable"] += 1
            # A machine that stalls may also run into the time limit for connecting.
            assert status in (200, 502, 503)
            # Not all in step.
            await asyncio.sleep(0.01 * number)

    async with start_proxy(FakeEngine(url=f"http://127.0.0.1:{port}")) as proxy:
        clients = [asyncio.create_task(client(proxy, i)) for i in range(12)]
        for _ in range(2):
            async with process(port) as engine:
                done = answers["completed"]
                await eventually(lambda done=done: answers["completed"] > done + 20, limit_s=20)  # type: ignore[misc]
                engine.kill()
                await engine.wait()
            failed = answers["upstream_unavailable"]
            await eventually(lambda failed=failed: answers["upstream_unavailable"] > failed + 20)  # type: ignore[misc]
        async with running(FakeEngine(), port):
            ended.set()
            await asyncio.gather(*clients)
            assert (await proxy.post(STREAM))[0] == 200
        entries = await proxy.entries(asked + 1)
        assert len(entries) == asked + 1
        assert Counter(entry["outcome"] for entry in entries) == answers + Counter(completed=1)
        assert answers["completed"]
        assert answers["upstream_unavailable"]
        assert answers["upstream_broken"]
        assert b'guard_requests_in_flight{route="/v1/chat/completions"} 0.0' in (await proxy.get("/metrics"))[2]


@both
async def test_many_requests_to_a_hung_engine_end_in_time_and_the_next_is_answered(
    start_proxy: StartProxy, stream: bool
) -> None:
    engine = FakeEngine(event_delay_s=None)
    async with running(engine), start_proxy(engine, read_timeout_s=0.5) as proxy:
        began_s = time.monotonic()
        found = await asyncio.gather(*(proxy.post({**BODY, "stream": stream}) for _ in range(30)))
        assert Counter(status for status, _, _ in found) == {504: 30}
        assert time.monotonic() - began_s < 10
        await eventually(lambda: engine.open == 0)
        engine.event_delay_s = 0.0
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 200
        outcomes = Counter(entry["outcome"] for entry in await proxy.entries(31))
        assert outcomes == {"upstream_unavailable": 30, "completed": 1}


async def test_policy_files_that_are_broken_under_load_change_nothing_for_anybody(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    file, ended, seen = tmp_path / "policy.yaml", asyncio.Event(), list[tuple[int, str, str]]()

    async def client(proxy: Proxy) -> None:
        while not ended.is_set():
            status, headers, _ = await proxy.post()
            seen.append((status, headers["x-guard-rules"], headers["x-guard-policy"]))

    async def told(proxy: Proxy, wanted: str) -> None:
        async with asyncio.timeout(20):
            while json.loads((await proxy.get("/readyz"))[2])["policies_reload"] != wanted:
                await asyncio.sleep(0.02)

    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine) as proxy:
        clients = [asyncio.create_task(client(proxy)) for _ in range(6)]
        label = (await proxy.post())[1]["x-guard-policy"]
        for broken in ("version: 1\nname: [", "", POLICY.replace("at_least: 0.9", "at_least: no_such"), "\x00\xff"):
            file.write_text(broken, encoding="latin-1")
            await told(proxy, "failed")
        file.unlink()
        await asyncio.sleep(0.1)
        assert (await proxy.post())[1]["x-guard-policy"] == label
        file.write_text(POLICY.replace("name: stop", "name: halt"))
        await told(proxy, "ok")
        before = len(seen)
        await eventually(lambda: len(seen) > before + 20, limit_s=20)
        ended.set()
        await asyncio.gather(*clients)
        assert {status for status, _, _ in seen} == {400}
        assert {(rules, policy == label) for _, rules, policy in seen} == {("stop,watch", True), ("halt,watch", False)}
        assert {rules for _, rules, _ in seen[before + 6 :]} == {"halt,watch"}
        assert len(await proxy.entries(len(seen) + 2)) == len(seen) + 2


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
async def test_a_clock_that_jumps_moves_no_limit_no_deadline_and_no_duration(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    class Jumped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Jumped:
            moment = datetime.now(tz) + timedelta(seconds=jump_s)
            return cls.fromtimestamp(moment.timestamp(), tz)

    file, engine = tmp_path / "keys.yaml", FakeEngine(answer_delay_s=0.5)
    key = {"authorization": f"Bearer {create_key(file, NewKey(limits=Limits(requests_per_s=0.1)))[0]}"}
    other = {"authorization": f"Bearer {create_key(file, NewKey())[0]}"}
    async with running(engine), start_proxy(engine, keys=file, read_timeout_s=30) as proxy:
        under_way = asyncio.create_task(proxy.post(STREAM, key))
        await eventually(lambda: engine.open == 1)
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        for module in ("guard.telemetry.record", "guard.proxy.key_store"):
            monkeypatch.setattr(f"{module}.datetime", Jumped)
        assert (await under_way)[0] == 200
        status, headers, _ = await proxy.post(STREAM, key)
        assert status == 429
        assert int(headers["retry-after"]) <= 10
        assert (await proxy.post(STREAM, other))[0] == 200
        # A policy that is written now has another time than the clock said before.
        (tmp_path / "policy.yaml").write_text(POLICY.replace("name: stop", "name: halt"))
        os.utime(tmp_path / "policy.yaml", (real() + jump_s, real() + jump_s))
        engine.logit = BLOCKED
        async with asyncio.timeout(20):
            while (await proxy.post(STREAM, other))[1].get("x-guard-rules") != "halt,watch":
                await asyncio.sleep(0.05)
        entries = await proxy.entries(4)
        assert [entry["outcome"] for entry in entries[:3]] == ["completed", "refused", "completed"]
        for entry in entries:
            assert all(0 <= ms < 20_000 for ms in entry["timings_ms"].values() if ms is not None)
        moved_s = [
            (datetime.fromisoformat(later["time"]) - datetime.fromisoformat(entries[0]["time"])).total_seconds()
            for later in entries[1:]
        ]
        assert all(abs(moved - jump_s) < 60 for moved in moved_s)


async def test_a_fault_of_the_proxy_is_a_500_whose_log_quotes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(BODY["messages"][0]["content"])

    monkeypatch.setattr("guard.proxy.chat.parsed", fail)
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
