"""Bodies that are no requests, or nearly ones, by the thousand: each is refused as a client's mistake or reaches the
engine as it came, and nothing else ever happens.

How many is ``GUARD_MALFORMED`` (default 1,000); ``bench/results`` has a run with 10,000.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from guard.policy.judged_paths import EMBEDDINGS
from tests.proxy.conftest import POLICY, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_endpoints import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES

COUNT = int(os.environ.get("GUARD_MALFORMED", "1000"))
FROM_SCHEMA = max(20, COUNT // 20)
"""Schemathesis makes few a second."""

SEED = 20261130
GENERATES = settings(database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
EACH = 40
CONNECTIONS = 24
PRIVATE = "private words"

Sent = tuple[str, bytes]
"""Path and body."""

RULES = POLICY.replace(
    "  danger: {kind: probe}\n", "  danger: {kind: probe, scope: [user, new_tool_results]}\n  text: {kind: words}\n"
)
RULES += "  - {name: leak, when: {detector: text, at_least: 0.5}, action: flag, on_error: flag}\n"

TEXT = {"type": "string"}
PARTS = {"anyOf": [TEXT, {"type": "array", "items": {"type": "object", "properties": {"type": TEXT, "text": TEXT}}}]}
MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {"role": TEXT, "content": PARTS}}
MODEL = {"type": "string", "minLength": 1}
SCHEMAS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": {"type": "array", "minItems": 1, "items": MESSAGE}, "n": {"type": "integer"}},
    COMPLETIONS: {"prompt": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": TEXT}]}},
    RESPONSES: {"input": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": MESSAGE}]}},
    MESSAGES: {"messages": {"type": "array", "minItems": 1, "items": MESSAGE}},
    EMBEDDINGS: {"input": {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}},
}
RICH: dict[str, dict[str, Any]] = {
    **BODIES,
    EMBEDDINGS: {"model": "tiny", "input": [PRIVATE, "b"]},
    CHAT: {
        "model": "tiny", "stream": False, "n": 2, "stream_options": {"include_usage": True}, "vllm_xargs": {"a": 1},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"x": "y"}, "documents": [{"text": "d"}],
        "messages": [
            {"role": "system", "content": PRIVATE}, {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "assistant", "content": None, "reasoning": "r",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ],
    },
    RESPONSES: {
        "model": "tiny", "instructions": "i",
        "input": [{"role": "user", "content": PRIVATE}, {"type": "function_call", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "output": "o"}, {"type": "reasoning", "summary": [{"text": "s"}]}],
    },
    MESSAGES: {
        "model": "tiny", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {"a": 1}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": PRIVATE}]}],
    },
}  # fmt: skip

JUNK: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, "", "x y", "\x00", "\ud800", "\u202e\u0301\u200b", "\\u0000", [], {},
    [None], [[]], [{}], {"": ""}, {"role": []}, {"type": {}}, [[[[[1]]]]], "9" * 500, ["a"] * 300, {"b": {"a": {}}},
]  # fmt: skip
PIECES = [
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b'"',
    b"\\",
    b"{",
    b"[" * 50,
    b"}",
    b",",
    b"NaN",
    b"1e999",
    b"\n",
    b"\xef\xbb\xbf",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def changed_value(chance: random.Random, body: dict[str, Any]) -> bytes:
    """Some values replaced, taken out or put in twice."""
    fields = json.loads(json.dumps(body))
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(list(places(fields)))
        holder = fields
        for key in path[:-1]:
            holder = holder[key]
        what = chance.random()
        if what < 0.7:
            holder[path[-1]] = json.loads(json.dumps(chance.choice(JUNK)))
        elif what < 0.9 and len(fields) > 1:
            del holder[path[-1]]
        elif isinstance(holder, dict):
            holder[str(chance.choice(JUNK))] = holder[path[-1]]
    return json.dumps(fields, ensure_ascii=chance.random() < 0.8).encode("utf-8", "surrogatepass")


def changed_bytes(chance: random.Random, body: dict[str, Any]) -> bytes:
    """Cut, mixed up, or with something in between."""
    raw = bytearray(json.dumps(body).encode())
    for _ in range(chance.randint(1, 5)):
        at, what = chance.randrange(len(raw) + 1), chance.random()
        if what < 0.2:
            del raw[at:]
        elif what < 0.5:
            raw[at:at] = chance.choice(PIECES)
        elif what < 0.8:
            raw[at : at + 1] = bytes([chance.randrange(256)])
        else:
            other = chance.randrange(len(raw) + 1)
            raw[at:at] = raw[min(at, other) : max(at, other)]
    return bytes(raw)


def mutated(count: int) -> list[Sent]:
    """Drawn by hypothesis, which says the seed of what fails."""
    found: list[Sent] = []

    @seed(SEED)
    @settings(GENERATES, max_examples=max(1, count // EACH))
    @given(st.integers(0, 2**64))
    def draw(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 - nothing secret
        for _ in range(EACH):
            path = chance.choice(list(RICH))
            change = chance.choice((changed_value, changed_value, changed_bytes))
            found.append((path, change(chance, RICH[path])))

    draw()
    return found


def from_schema(count: int) -> list[Sent]:
    """What schemathesis takes for violations of the schema, and for requests."""
    operations = {}
    for path, properties in SCHEMAS.items():
        body = {"type": "object", "required": ["model", *properties], "properties": {"model": MODEL, **properties}}
        content = {"content": {"application/json": {"schema": body}}, "required": True}
        operations[path] = {"post": {"requestBody": content, "responses": {"200": {"description": "an answer"}}}}
    document = {"openapi": "3.1.0", "info": {"title": "guard", "version": "1"}, "paths": operations}
    schema = schemathesis.openapi.from_dict(document)
    return [
        (path, raw)
        for path in SCHEMAS
        for mode, share in ((GenerationMode.NEGATIVE, 0.75), (GenerationMode.POSITIVE, 0.25))
        for raw in drawn(schema[path]["POST"].as_strategy(generation_mode=mode), round(count * share / len(SCHEMAS)))
    ]


def drawn(cases: st.SearchStrategy[Any], count: int) -> list[bytes]:
    """Their bodies."""
    found: list[bytes] = []

    @seed(SEED)
    @settings(GENERATES, max_examples=max(1, count))
    @given(cases)
    def draw(case: Any) -> None:
        body = case.body
        raw = body if isinstance(body, bytes) else json.dumps(body, default=str).encode("utf-8", "surrogatepass")
        found.append(raw)

    draw()
    return found


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


async def test_thousands_of_malformed_bodies_are_refused_or_passed_on_and_nothing_else(start_proxy: StartProxy) -> None:
    waiting = from_schema(FROM_SCHEMA) + mutated(COUNT - FROM_SCHEMA)
    number, seen = len(waiting), Counter[str]()
    wrong: list[tuple[int, str, bytes]] = []
    async with running(FakeEngine()) as engine, start_proxy(engine, RULES, connect_timeout_s=60) as proxy:

        async def client(session: aiohttp.ClientSession) -> None:
            while waiting:
                path, raw = waiting.pop()
                headers = {"content-type": "application/json"}
                async with session.post(proxy.url + path, data=raw, headers=headers) as answer:
                    status, got = answer.status, await answer.read()
                seen[f"{status}"] += 1
                if status not in (200, 400):
                    wrong.append((status, path, raw[:2000]))
                if status == 400:
                    error = json.loads(got)["error"]
                    assert error.keys() == {"message", "type", "param", "code"}
                    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_request")
                    assert PRIVATE not in error["message"]

        # Each has a connection of its own: where the machine stalls, a kept one may be closed just as it is used again.
        connector = aiohttp.TCPConnector(limit=CONNECTIONS, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(client(session) for _ in range(CONNECTIONS)))
        assert not wrong, wrong[:3]
        assert seen["400"] > number // 4
        assert seen["200"] > number // 10
        assert len(engine.bodies) == seen["200"]
        entries = await proxy.entries(number)
        assert len(entries) == number
        assert Counter(entry["outcome"] for entry in entries) == {"refused": seen["400"], "completed": seen["200"]}
        assert PRIVATE not in proxy.ledger.read_text()
        assert (await proxy.get("/readyz"))[0] == 200
    print(f"{number} bodies: {dict(seen)}")
