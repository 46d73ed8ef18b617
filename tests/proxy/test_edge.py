"""What the proxy refuses at its edge, and that nothing it lets in means something else to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import re
from typing import Any

import aiohttp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guard import folded_log
from guard.mia.spec import HiddenCapture, MiaSpec
from guard.policy.conversation import KNOWN_ROLES
from guard.policy.schema import Redaction
from guard.proxy.body import parse_request
from guard.proxy.errors import InvalidRequestError
from guard.proxy.services import FORMS
from guard.proxy.usage import most_completion_tokens, most_prompt_tokens
from guard.proxy.wire import Form
from guard.proxy.wire_choices import chat_form
from tests.proxy.conftest import BLOCKED, BODY, POLICY, Proxy, StartProxy
from tests.proxy.engine import FakeEngine, running

SPEC = MiaSpec(hidden={"a.h": HiddenCapture(layer=3)})
MESSAGES = b'"messages":[{"role":"user","content":"private words"}]'
CHAT = "/v1/chat/completions"


def wire(extra: bytes) -> bytes:
    return b'{"model":"tiny",' + MESSAGES + b"," + extra + b"}"


MALFORMED = {
    "empty": (b"", None),
    "not JSON": (b"{'model': 1}", None),
    "cut off": (b'{"model": "tiny"', None),
    "a list": (b"[]", None),
    "a number": (b"7", None),
    "null": (b"null", None),
    "not UTF-8": (b'{"model": "\xff"}', None),
    "with a byte order mark": (b"\xef\xbb\xbf" + wire(b'"n":1'), None),
    "two values": (wire(b'"n":1') * 2, None),
    "the same key twice": (wire(b'"model":"tiny"'), None),
    "the same key twice, spelt differently": (wire(b'"mod\\u0065l":"tiny"'), None),
    "the same key twice, deep inside": (wire(b'"tools":[{"a":{"x":1,"x":2}}]'), None),
    "NaN": (wire(b'"temperature":NaN'), None),
    "Infinity": (wire(b'"temperature":-Infinity'), None),
    "a float beyond float64": (wire(b'"temperature":1e999'), None),
    "an integer of 10,000 digits": (wire(b'"seed":' + b"9" * 10_000), None),
    "nested 100,000 deep": (wire(b'"tools":' + b"[" * 100_000 + b"]" * 100_000), None),
    "lists nested 201 deep": (wire(b'"x":' + b"[" * 200 + b"]" * 200), None),
    "objects nested 600 deep": (wire(b'"x":' + b'{"a":' * 600 + b"1" + b"}" * 600), None),
    "no model": (b"{" + MESSAGES + b"}", "model"),
    "an empty model": (b'{"model":"",' + MESSAGES + b"}", "model"),
    "a model that is a number": (b'{"model":1,' + MESSAGES + b"}", "model"),
    "no messages": (b'{"model":"tiny"}', "messages"),
    "empty messages": (b'{"model":"tiny","messages":[]}', "messages"),
    "messages that are text": (b'{"model":"tiny","messages":"private words"}', "messages"),
    "a message that is text": (b'{"model":"tiny","messages":["private words"]}', "messages[0]"),
    "a message without role": (b'{"model":"tiny","messages":[{"content":"private words"}]}', "messages[0].role"),
    "stream that is text": (wire(b'"stream":"true"'), "stream"),
    "stream that is a number": (wire(b'"stream":1'), "stream"),
    "vllm_xargs that is text": (wire(b'"vllm_xargs":"mia"'), "vllm_xargs"),
    "our own field": (wire(b'"vllm_xargs":{"mia":"{}"}'), "vllm_xargs.mia"),
    "MIA's way to steer": (wire(b'"vllm_xargs":{"steer":"{}"}'), "vllm_xargs.steer"),
    "our own field, spelt differently": (wire(b'"vllm_xarg\\u0073":{"m\\u0069a":"{}"}'), "vllm_xargs.mia"),
    "beam search, which cannot be read": (wire(b'"use_beam_search":true'), "use_beam_search"),
    "a prompt without its end": (wire(b'"add_generation_prompt":false'), "add_generation_prompt"),
    "an answer to go on with": (wire(b'"continue_final_message":true'), "continue_final_message"),
    "a prompt cut short": (wire(b'"truncate_prompt_tokens":5'), "truncate_prompt_tokens"),
    "a template of one's own": (wire(b'"chat_template":"{{ messages }}"'), "chat_template"),
    "the same inside the template's arguments": (
        wire(b'"chat_template_kwargs":{"add_generation_prompt":false}'),
        "chat_template_kwargs.add_generation_prompt",
    ),
    "a prompt that is padded": (
        wire(b'"chat_template_kwargs":{"tokenize":true,"padding":"max_length","max_length":36}'),
        "chat_template_kwargs.tokenize",
    ),
    "padding alone": (wire(b'"chat_template_kwargs":{"padding":true}'), "chat_template_kwargs.padding"),
    "a prompt cut by its template": (
        wire(b'"chat_template_kwargs":{"truncation":true,"max_length":9}'),
        "chat_template_kwargs.truncation",
    ),
    "a prompt made tokens for a mask": (wire(b'"return_assistant_tokens_mask":true'), "return_assistant_tokens_mask"),
    "special tokens around a chat": (wire(b'"add_special_tokens":true'), "add_special_tokens"),
    "arguments for the tokenizer": (
        wire(b'"chat_template_kwargs":{"tokenizer_kwargs":{"padding":"max_length"}}'),
        "chat_template_kwargs.tokenizer_kwargs",
    ),
    "a processor that cuts": (wire(b'"mm_processor_kwargs":{"max_length":9}'), "mm_processor_kwargs.max_length"),
    "another conversation": (wire(b'"chat_template_kwargs":{"conversation":[]}'), "chat_template_kwargs.conversation"),
    "another end of a message": (wire(b'"chat_template_kwargs":{"eos_token":"x"}'), "chat_template_kwargs.eos_token"),
    "a message to go on with": (
        b'{"model":"tiny","messages":[{"role":"assistant","content":"Sure,","prefix":true}]}',
        "messages[0].prefix",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_is_a_400_in_openais_shape_and_goes_no_further(proxy: Proxy, name: str) -> None:
    raw, param = MALFORMED[name]
    status, headers, body = await proxy.post(raw)
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
    assert error["param"] == param
    assert "private words" not in body.decode()
    assert headers["x-request-id"]
    assert not proxy.engine.bodies
    entry = await proxy.entry()
    assert (entry["outcome"], entry["status"], entry["action"]) == ("refused", 400, "none")


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_request_or_a_refusal(raw: bytes) -> None:
    try:
        assert parse_request(chat_form, raw).model
    except InvalidRequestError:
        return


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_engine_gets_every_field_unchanged_but_for_ours(extra: dict[str, Any], ascii_only: bool) -> None:
    fields = {"vllm_xargs": {"other": "x"}, **{f"x_{name}": value for name, value in extra.items()}, **BODY}
    parsed = parse_request(chat_form, json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    sent = json.loads(parsed.to_json(SPEC.to_wire()))
    assert sent["vllm_xargs"].pop("mia") == SPEC.to_wire()
    assert sent == fields
    assert json.loads(parsed.to_json()) == fields


async def test_a_body_as_deep_as_may_be_is_redacted_and_passed_on(start_proxy: StartProxy) -> None:
    text = POLICY.replace("action: block", "action: redact\n    redact: {messages: [user], replacement: gone}")
    deep = b'"x":' + b'{"a":' * 199 + b"1" + b"}" * 199
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, text) as proxy:
        status, headers, _ = await proxy.post(wire(deep))
        assert (status, headers["x-guard-action"]) == (200, "redact")
        assert json.dumps(engine.bodies[-1]["x"]).count("{") == 199
        assert engine.bodies[-1]["messages"][0]["content"] == "gone"


@given(json_values)
@settings(deadline=None)
def test_a_deep_or_odd_messages_field_never_raises_anything_else(messages: Any) -> None:
    refusal = None
    try:
        parse_request(chat_form, json.dumps({"model": "m", "messages": messages}).encode())
    except InvalidRequestError as error:
        refusal = error
    assert refusal is None or (refusal.param or "").startswith("messages")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused_as_soon_as_that_is_known(
    start_proxy: StartProxy, chunked: bool
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, max_body_bytes=2048) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode())
        if chunked:
            writer.write(b"transfer-encoding: chunked\r\n\r\n" + b"800\r\n" + b" " * 2048 + b"\r\n1\r\n \r\n")
        else:
            writer.write(b"content-length: 3000000000\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(4096), 5)
        assert b" 413 " in answer.splitlines()[0]
        assert b"request_too_large" in answer
        writer.close()
        assert (await proxy.entry())["error_code"] == "request_too_large"


async def test_a_large_body_within_the_limit_passes(proxy: Proxy) -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "ä" * 1_000_000}]}
    assert (await proxy.post(body))[0] == 200
    assert proxy.engine.bodies[0]["messages"] == body["messages"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/responses/resp_1/cancel", 404), ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/", 404), ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404), ("POST", "/v1/chat/completions/", 404), ("POST", "//v1/chat/completions", 404),
        ("POST", "/v1/chat/../chat/completions", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("POST", "/V1/chat/completions", 404), ("POST", "/v1/mia/capabilities", 404),
    ],
)  # fmt: skip
async def test_nothing_else_reaches_the_engine(proxy: Proxy, method: str, path: str, status: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert f" {status} ".encode() in head.splitlines()[0]
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    writer.close()
    allowed = {CHAT: b"POST", "/v1/models": b"GET", "/v1/models/tiny": b"GET"}
    assert status != 405 or b"allow: " + allowed[path] in head.splitlines()
    assert not proxy.engine.headers
    assert (await proxy.entry())["outcome"] == "refused"


async def test_a_percent_encoded_path_is_the_route_itself_and_guarded(proxy: Proxy) -> None:
    status, headers, _ = await proxy.post(path="/v1/chat%2Fcompletions")
    assert status in (200, 404)
    assert status == 404 or headers["x-guard-action"] == "allow"


async def test_a_web_page_cannot_use_the_proxy(proxy: Proxy) -> None:
    assert (await proxy.post(headers={"content-type": "text/plain"}))[0] == 415
    for path in ("/v1/models", "/metrics"):
        status, _, body = await proxy.get(path, {"host": "attacker.example"})
        assert (status, json.loads(body)["error"]["code"]) == (403, "forbidden_host")
    assert (await proxy.post(headers={"host": "attacker.example:8080"}))[0] == 403
    assert not proxy.engine.headers


async def test_with_keys_only_their_holders_are_answered_and_no_key_goes_further(start_proxy: StartProxy) -> None:
    hashes = ",".join(hashlib.sha256(key.encode()).hexdigest() for key in ("key-one", "key-two"))
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, api_key_hashes=hashes, upstream_api_key="engine-key") as proxy:
        for given_key in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-one"}):
            status, headers, body = await proxy.post(headers=given_key)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer"
        assert not engine.bodies
        for key in ("key-one", "key-two"):
            assert (await proxy.post(headers={"authorization": f"Bearer {key}", "host": "guard.example"}))[0] == 200
        assert {headers["authorization"] for headers in engine.headers} == {"Bearer engine-key"}
        assert "key-one" not in proxy.ledger.read_text()


async def test_headers_pass_by_list_in_both_directions(proxy: Proxy) -> None:
    sent = {"authorization": "Bearer mine", "cookie": "a=b", "x-mia-early": "0", "x-custom": "1", "traceparent": "00-1"}
    _, headers, _ = await proxy.post(headers=sent)
    (got,) = proxy.engine.headers
    assert got.keys() & sent.keys() == {"x-mia-early", "traceparent"}
    assert (got["x-mia-early"], got["traceparent"]) == ("1", "00-1")
    assert "x-internal" not in headers


@pytest.mark.parametrize("bad", ["", "a b", "x" * 65, "../../etc", "id;drop", "é", "-x"])
async def test_a_request_id_that_is_not_a_plain_token_is_replaced(proxy: Proxy, bad: str) -> None:
    _, headers, _ = await proxy.post(headers={"x-request-id": bad})
    assert headers["x-request-id"] not in ("", bad)
    assert headers["x-request-id"] == headers["x-guard-request-id"] == proxy.engine.headers[0]["x-request-id"]
    assert (await proxy.entry())["request_id"] == headers["x-request-id"]


async def test_a_header_cannot_be_injected_through_anything_that_is_echoed(proxy: Proxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rsplit(":", 1)[1]))
    data = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}x-request-id: a\x0bset-cookie: b\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    assert b"set-cookie" not in answer
    writer.close()


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
SMUGGLED = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: smuggled\r\n\r\n"
LENGTH = str(len(json.dumps(BODY))).encode()
IN_CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(json.dumps(BODY)), json.dumps(BODY).encode())
FRAMINGS = {
    "a length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 0\r\ncontent-length: " + LENGTH + b"\r\n\r\n",
    "two lengths in one": b"content-length: 0, " + LENGTH + b"\r\n\r\n",
    "a length with a sign": b"content-length: +" + LENGTH + b"\r\n\r\n",
    "a negative length": b"content-length: -1\r\n\r\n",
    "a length in hex": b"content-length: 0x10\r\n\r\n",
    "a length of 30 digits": b"content-length: " + b"9" * 30 + b"\r\n\r\n",
    "a space before the colon": b"content-length : " + LENGTH + b"\r\n\r\n",
    "a name that is folded": b"x-a: b\r\n content-length: 5\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n",
    "an unknown coding": b"transfer-encoding: xchunked\r\n\r\n" + IN_CHUNKS,
    "chunked, and then another coding": b"transfer-encoding: chunked, identity\r\n\r\n" + IN_CHUNKS,
    "a coding with a vertical tab": b"transfer-encoding: \x0bchunked\r\n\r\n" + IN_CHUNKS,
    "a chunk's size with a sign": b"transfer-encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "a chunk's size in the wrong base": b"transfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "a chunk's size beyond 64 bits": b"transfer-encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n",
    "a chunk longer than it says": b"transfer-encoding: chunked\r\n\r\n1\r\nhello\r\n0\r\n\r\n",
    "NUL in a header": b"x-a: b\x00c\r\ncontent-length: 0\r\n\r\n",
    "a bare CR in a header": b"x-a: b\rcontent-length: 5\r\n\r\n",
    "a header without a name": b": b\r\n\r\n",
    "a header without a colon": b"content-length\r\n\r\n",
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_two_framings_of_one_body_are_refused(proxy: Proxy, framing: str) -> None:
    """Request smuggling: what one server takes as the next request must not be this one's body to another. Nothing
    after a request whose end is in doubt is read as a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    writer.write(HEAD + FRAMINGS[framing] + SMUGGLED)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert all(status in (b"400", b"413", b"415") for status in statuses), answer
    assert b"smuggled" not in answer
    writer.close()
    assert not proxy.engine.bodies
    assert "smuggled" not in proxy.ledger.read_text()


async def raw(proxy: Proxy, *parts: bytes) -> bytes:
    """What comes back until the proxy closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
    found = await asyncio.wait_for(answer, 10)
    writer.close()
    return found


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"
MANY = b"a" * 65_536
LARGE_HEADS = {
    "one header without end": [HEAD, b"x-a: ", *[MANY] * 40],
    "one header": [HEAD + b"x-a: " + MANY + b"\r\n\r\n"],
    "a name without end": [HEAD, *[MANY] * 40],
    "headers of a few kilobytes": [HEAD, *[b"x-a: " + MANY[:4000] + b"\r\n"] * 40],
    "very many headers": [HEAD + b"a: b\r\n" * 5000 + b"\r\n"],
    "a target without end": [b"GET /", *[MANY] * 40],
    "a target": [b"GET /" + MANY + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"],
    "a trailer without end": [CHUNKED, b"0\r\nx-a: ", *[MANY] * 40],
    "very many trailers": [CHUNKED, b"0\r\n" + b"a: b\r\n" * 5000 + b"\r\n"],
    "a chunk's extension without end": [CHUNKED, b"1;", *[MANY] * 40],
    "the second request of a connection": [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
        HEAD,
        b"x-a: ",
        *[MANY] * 40,
    ],
}


@pytest.mark.parametrize("head", LARGE_HEADS)
async def test_a_head_is_bounded_before_anybody_is_asked_for_a_key(proxy: Proxy, head: str) -> None:
    answer = await raw(proxy, *LARGE_HEADS[head])
    last = answer[answer.rfind(b"HTTP/1.1 ") :]
    assert last.startswith(b"HTTP/1.1 431 ")
    assert b"\r\nconnection: close\r\n" in last
    assert json.loads(last.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    assert not proxy.engine.bodies


async def test_a_head_and_a_body_as_large_as_they_may_be_pass(proxy: Proxy) -> None:
    headers = {f"x-{i}": "a" * 500 for i in range(100)}
    body = json.dumps({**BODY, "x": "a" * 1_000_000}).encode()
    assert (await proxy.post(body, headers))[0] == 200


async def test_what_is_no_request_is_counted_and_a_flood_of_it_is_one_line_in_the_log(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn warns of each, of an upgrade that it does not know, too."""
    log, told = logging.getLogger(folded_log.SERVER_LOG), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    upgrade = b"GET /livez HTTP/1.1\r\nhost: h\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n"
    try:
        for _ in range(20):
            assert (await raw(proxy, b"\x16\x03\x01 no HTTP\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
            assert b"200 OK" in await raw(proxy, upgrade)
        await raw(proxy, b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        await raw(proxy, HEAD, b"x-a: ", *[MANY] * 2)
        assert [one[:19] for one in told] == ["Invalid HTTP reques", "Unsupported upgrade", "No supported WebSoc"]
        monkeypatch.setattr(folded_log, "FOLD_S", 0.0)
        await raw(proxy, b"\x00\r\n\r\n")
        assert told[3].startswith("Invalid HTTP request received. (and 20 more")
    finally:
        log.removeHandler(handler)
    _, _, text = await proxy.get("/metrics")
    for reason, count in (("not_http", 21), ("repeated_header", 1), ("head_too_large", 1)):
        assert f'guard_malformed_requests_total{{reason="{reason}"}} {count:.1f}' in text.decode()
    assert proxy.ledger.read_text() == ""


@pytest.mark.parametrize("name", ["Host", "Authorization", "X-Api-Key", "Content-Type"])
async def test_two_headers_that_say_who_asks_or_whom_are_none(proxy: Proxy, name: str) -> None:
    two = f"{name}: localhost\r\n{name.lower()}: attacker.example\r\n"
    host = "" if name == "Host" else "host: localhost\r\n"
    answer = await raw(proxy, f"GET /livez HTTP/1.1\r\n{host}{two}\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert name.lower() in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


async def test_a_trailer_is_no_header(proxy: Proxy) -> None:
    data = json.dumps(BODY).encode()
    chunks = b"%x\r\n%s\r\n0\r\nx-request-id: late\r\n\r\n" % (len(data), data)
    answer = await raw(proxy, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert (await proxy.entry())["client_request_id"] is None


async def test_requests_in_a_row_on_one_connection_are_each_judged(proxy: Proxy) -> None:
    """A body that looks like a request stays a body."""
    inside = json.dumps({**BODY, "x": SMUGGLED.decode()}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    for _ in range(3):
        writer.write(HEAD + b"content-length: %d\r\n\r\n%s" % (len(inside), inside))
    for _ in range(3):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200 ")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        assert await reader.readexactly(int(length[1])) == proxy.engine.whole()
    writer.close()
    assert [body["x"] for body in proxy.engine.bodies] == [SMUGGLED.decode()] * 3
    assert len({entry["request_id"] for entry in await proxy.entries(3)} - {"smuggled"}) == 3


INJECTED = ("a\r\nset-cookie: b", "a\nx-guard-action: allow", "a\rb", "a\x00b", "\u2028", "\u560d\u560aset-cookie:b")


@pytest.mark.parametrize("value", INJECTED, ids=ascii)
async def test_no_field_of_a_body_becomes_a_header_of_anybody(start_proxy: StartProxy, value: str) -> None:
    """Models, users, ids and the engine's own words are a client's, or nobody's, to choose."""
    engine = FakeEngine(extra_headers={"retry-after": "1", "retry-after-ms": "\u65e5"})
    async with running(engine), start_proxy(engine) as proxy:
        body = {**BODY, "model": value, "user": value, "request_id": value, "metadata": {value: value}}
        status, headers, _ = await proxy.post({**body, "stream": True})
        assert status == 200
        assert "set-cookie" not in headers
        assert headers["x-guard-action"] == "allow"
        assert headers["x-request-id"].isalnum()
        (sent,) = engine.headers
        assert "set-cookie" not in sent
        assert all(value not in one for one in sent.values())
        assert (await proxy.entry())["model"] == value


TARGETS = {
    "another host's": "http://attacker.example/v1/chat/completions",
    "with a query": f"{CHAT}?x=1&guard=off",
    "with a fragment": f"{CHAT}#/livez",
    "encoded": "/v1/%63hat/completions",
    "with a parameter": f"{CHAT};x=1",
    "with a dot": "/v1/./chat/completions",
    "with a backslash": "\\v1\\chat\\completions",
    "with a NUL": "/v1/chat/completions%00",
    "with a line's end": "/v1/chat/completions%0d%0ax: y",
}


@pytest.mark.parametrize("target", TARGETS)
async def test_a_route_is_guarded_or_refused_however_its_path_is_written(start_proxy: StartProxy, target: str) -> None:
    data = json.dumps(BODY).encode()
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, passed_paths="/v1/score") as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        head = f"POST {TARGETS[target]} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        status = int((await asyncio.wait_for(reader.read(), 5)).split()[1])
        assert status in (400, 404)
        writer.close()
        assert set(engine.paths) <= {CHAT}
        assert not engine.bodies or "mia" in engine.bodies[0]["vllm_xargs"]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics"])
async def test_load_balancers_may_ask_with_head(proxy: Proxy, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.head(proxy.url + path) as answer:
        assert answer.status == 200
        assert await answer.read() == b""


FIELDS = (
    *("type", "role", "content", "text", "input", "output", "tool_use_id", "call_id", "id", "name", "arguments"),
    *("summary", "source", "file", "function", "tool_calls", "data", "image_url", "status", "suffix"),
)
KINDS_OF_PARTS = (
    *("text", "tool_result", "tool_use", "image", "document", "input_text", "function_call", "function_call_output"),
    *("mcp_call", "file_search_call", "web_search_tool_result", "reasoning", "message", "content", "base64"),
)
shapes = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | st.sampled_from((*KINDS_OF_PARTS, "", "user")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
        | st.builds(lambda kind, content: {"type": kind, "content": content}, st.sampled_from(KINDS_OF_PARTS), inner)
        | st.builds(lambda odd: {"type": odd}, inner)
    ),
    max_leaves=12,
)
turns = st.lists(
    st.builds(
        lambda role, more: {**more, "role": role},
        st.sampled_from(("user", "assistant", "tool", "system", "developer", "other")),
        st.dictionaries(st.sampled_from(FIELDS), shapes, max_size=4),
    ),
    min_size=1,
    max_size=3,
)
AROUND_FIELDS = ("tools", "documents", "suffix", "text", "max_tokens", "n", "stream_interval", "instructions")


@pytest.mark.parametrize("form", FORMS, ids=[form.route for form in FORMS])
@given(turns, shapes, st.dictionaries(st.sampled_from(AROUND_FIELDS), shapes, max_size=3))
@example([{"content": [], "role": "other"}, {"role": "user", "content": "hi"}], None, {})
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_shape_of_a_message_breaks_what_the_guard_does_with_it(
    form: Form, given_turns: Any, shape: Any, around: dict[str, Any]
) -> None:
    blocks = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [shape]}, shape]}]
    said = [*given_turns, *blocks]
    fields = {"model": "m", "messages": said, "input": said, "prompt": shape, "system": shape, **around}
    try:
        request = parse_request(form, json.dumps(fields).encode())
    except InvalidRequestError:
        return
    assert all(isinstance(text, str) for _, _, text in (*request.texts, *request.said))
    assert isinstance(request.unread, str)
    assert most_prompt_tokens(request) >= 0
    assert most_completion_tokens(form, request.fields) >= 0
    redacted = request.redacted([Redaction(messages=("user", "tool", "system", "assistant"), replacement="gone")])
    # A stranger's role becomes the user's, and an empty message of the user's is none.
    strangers = sum(role not in KNOWN_ROLES for role in request.roles)
    assert len(request.roles) - strangers <= len(redacted.roles) <= len(request.roles)
    assert request.to_json()


async def test_a_block_whose_type_is_no_text_is_a_400(proxy: Proxy) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": []}]}
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": [result]}]}
    status, _, raw = await proxy.post(body, path="/v1/messages")
    assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[0].content")
    assert not proxy.engine.bodies
