"""What a model server sends with a status, a version or a header that no answer has: nothing of it leaves unread."""

from __future__ import annotations

import json

import pytest

from tests.proxy.conftest import BODY, POLICY, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.raw import raw_server
from tests.proxy.test_endpoints import body_of, every, streams, whole
from tests.proxy.test_streaming import policy

SSE = "text/event-stream"
ODD = (101, 201, 202, 203, 204, 206, 226, 299, 300, 301, 304, 307, 399, 600, 700, 999)
"""Statuses that say neither that the answer is there nor that something is wrong."""

FAILED = (400, 401, 404, 409, 422, 429, 499, 500, 503, 599)
MEDIA_TYPES = (
    "application/json",
    SSE,
    "TEXT/Event-Stream; a=b",
    "text/plain",
    "application/json, text/event-stream",
    "",
)


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


@every
@pytest.mark.parametrize("contract", ["hold", "window", "observe", "none"])
async def test_an_answer_of_whatever_status_and_form_is_judged_or_withheld(
    start_proxy: StartProxy, route: str, contract: str
) -> None:
    rules = POLICY if contract == "none" else policy(contract)
    bodies = (whole(route, "a secret"), b"".join(streams(route, ("a ", "secret"))))
    async with raw_server() as server, start_proxy(FakeEngine(url=server.url), rules) as proxy:
        for status in (*ODD, *(FAILED if contract != "none" else ())):
            for body, media_type in zip(bodies, ("application/json", SSE), strict=True):
                for stream in (False, True):
                    server.says(status, body, media_type)
                    got, _, raw = await proxy.post(body_of(route, stream), path=route)
                    assert b"secret" not in raw, (status, media_type, stream)
                    assert got == (502 if status in ODD else status)
                    assert json.loads(raw)["error"]["message"]
        for media_type in MEDIA_TYPES if contract in ("hold", "window") else ():
            for body in bodies:
                for stream in (False, True):
                    server.says(200, body, media_type)
                    got, headers, raw = await proxy.post(body_of(route, stream), path=route)
                    assert b"secret" not in raw, (media_type, stream)
                    assert got != 200 or headers["content-type"].lower().startswith(("application/json", SSE))


async def test_an_answer_behind_its_readouts_needs_a_status_too(start_proxy: StartProxy) -> None:
    engine = FakeEngine(later_body={"choices": [{"index": 0, "message": {"content": "a secret"}}]})
    async with running(engine):
        for rules in (policy("hold"), POLICY):
            async with start_proxy(engine, rules) as proxy:
                for engine.later_error in (-1, 99, 199, 201, 206, 304, 600):
                    status, _, raw = await proxy.post()
                    assert (status, b"secret" in raw) == (502, False)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ({"error": {"message": "too long", "type": "x", "param": "messages", "code": 400}}, None),
        ({"object": "error", "message": "too long", "type": "x", "param": None, "code": 400}, None),
        ({"type": "error", "error": {"type": "x", "message": "too long"}, "request_id": "r"}, None),
        ({"detail": "Not Found"}, None),
        ({"error": "too long"}, None),
        ({"error": {"message": "no", "more": "a secret"}, "choices": ["a secret"]}, {"error": {"message": "no"}}),
        ({"detail": [{"input": "a secret"}], "message": "too long"}, {"message": "too long"}),
        ({"error": {"message": ["a secret"]}}, "ours"),
        (["a secret"], "ours"),
    ],
)  # fmt: skip
async def test_an_error_about_a_request_keeps_its_words_and_has_nothing_beside_them(
    start_proxy: StartProxy, sent: object, told: object
) -> None:
    async with raw_server() as server, start_proxy(FakeEngine(url=server.url), policy("hold")) as proxy:
        server.says(400, json.dumps(sent).encode())
        status, headers, raw = await proxy.post()
        assert (status, headers["content-type"]) == (400, "application/json")
        if told == "ours":
            assert json.loads(raw)["error"]["message"] == "the model server ended its answer with an error"
        else:
            assert raw == json.dumps(sent).encode() if told is None else json.loads(raw) == told


HEADS = (
    *("HTTP/1.1 600 X", "HTTP/1.1 99 X", "HTTP/1.1 X", "HTTP/9.9 200 X", "ICY 200 X", ""),
    *("HTTP/1.1 101 X", "HTTP/1.1 000 X", "HTTP/1.1 -1 X", "HTTP/1.1 20000 X", "HTTP/1.1"),
)
EMBED = {"model": "tiny", "input": "x"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", BODY),
        ("/v1/chat/completions", {**BODY, "stream": True}),
        ("/v1/embeddings", EMBED),
        ("/v1/models", None),
        ("/other", None),
    ],
)
async def test_every_status_and_version_ends_in_an_answer(
    start_proxy: StartProxy, path: str, body: dict[str, object] | None
) -> None:
    async with (
        raw_server() as server,
        start_proxy(FakeEngine(url=server.url), passed_paths=["/other"], read_timeout_s=20) as proxy,
    ):
        for line in HEADS:
            server.says(line, b"{}")
            status, _, raw = await (proxy.get(path) if body is None else proxy.post(body, path=path))
            assert (status, json.loads(raw)["error"]["code"]) == (502, "upstream_unavailable"), line
        # What comes before the answer itself is nothing to anybody.
        server.says("HTTP/1.1 103 X\r\nlink: x\r\n\r\nHTTP/1.1 409 X", b'{"detail": "no"}')
        assert (await (proxy.get(path) if body is None else proxy.post(body, path=path)))[0] == 409
        *odd, last = [one["outcome"] for one in await proxy.entries(len(HEADS) + 1)]
        assert ({*odd}, last) == ({"upstream_unavailable"}, "upstream_error")


@pytest.mark.parametrize(
    ("sent", "passes"),
    [
        ("7", True), ("0.5", True), ("Wed, 21 Oct 2026 07:28:00 GMT", True), ("sk-supersecretkey1234567890", False),
        ("soon", False), ("-1", False), ("\u0661", False), ("9" * 40, False), ("7, 8", False),
    ],
)  # fmt: skip
async def test_when_to_come_back_is_a_number_or_a_date(start_proxy: StartProxy, sent: str, passes: bool) -> None:
    async with raw_server() as server, start_proxy(FakeEngine(url=server.url)) as proxy:
        for name in ("retry-after", "Retry-After-MS"):
            server.says(429, b'{"error": "busy"}', head=f"{name}: {sent}\r\n")
            _, headers, _ = await proxy.post()
            number = sent.replace(".", "").isdecimal()
            assert headers.get(name.lower()) == (sent if passes and (number or name == "retry-after") else None)
