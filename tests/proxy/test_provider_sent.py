"""Whatever of a request does not reach another provider is refused by name, with the real litellm between."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.conftest import Proxy, StartProxy
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_provider_media import MODELS, POLICY, listening, models_at, parts

pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")
pytestmark = pytest.mark.usefixtures("one_process")

MARK = "MARK00000000"
HI: Any = [{"role": "user", "content": "hi"}]
SCHEMA: Any = {
    "type": "object",
    "title": "T",
    "properties": {"city": {"type": "string", "description": "which"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "of a day", "parameters": SCHEMA}}


def with_schema(schema: dict[str, Any]) -> Any:
    """A tool with one argument of it."""
    function = {**TOOL["function"], "parameters": {"type": "object", "properties": {"k": schema}}}
    return {**TOOL, "function": function}


CALL: Any = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'},
}
TOOLED: Any = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


def result(*content: Any) -> list[Any]:
    return [*TOOLED, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}, *content]}]


def result_of(text: str) -> list[Any]:
    return [*TOOLED, {"role": "tool", "tool_call_id": "c1", "content": text}]


def with_parts(part: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Messages of each role with a part."""
    held = [{"type": "text", "text": "a"}, part]
    return {
        "tool": result(part),
        "system": [{"role": "system", "content": held}, *HI],
        "assistant": [*HI, {"role": "assistant", "content": held}, *HI],
        "user": [{"role": "user", "content": held}],
    }


@pytest.fixture
def start(start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAR_KEY", "k")

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[Proxy, list[str]]]:
        """And all bodies that reached a provider."""
        async with (
            running(FakeEngine()) as near,
            listening() as (url, bodies, _),
            start_proxy(near, POLICY, providers=models_at(url, tmp_path)) as proxy,
        ):
            yield proxy, bodies

    return start


def named(raw: bytes) -> str:
    error = json.loads(raw)["error"]
    return str(error["param"]) if error["code"] == "invalid_request" else ""


LEFT_OUT: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (("gemini", "anthropic", "deepseek"), {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
    (("anthropic",), {"response_format": {"type": "json_object"}}, "response_format"),
    (tuple(MODELS), {"stop": list("abcdefghi")}, "stop"),
    (("ollama_chat", "ollama"), {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    (("mistral", "ollama"), {"tools": [TOOL], "tool_choice": {**TOOL, "function": {"name": "weather"}}}, "tool_choice"),
    (("gemini",), {"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    (("anthropic", "ollama_chat"), {"messages": [{**HI[0], "name": "bob"}]}, "messages[0].name"),
    (("anthropic", "mistral", "ollama"), {"n": 2}, "n"),
    (("anthropic", "gemini"), {"logit_bias": {"5": 1}}, "logit_bias"),
    (("openai",), {"temperature": [1]}, "temperature"),
    (("gemini",), {"tools": [with_schema({"const": "v"})]}, "tools[0].function.parameters.properties.k.const"),
    (("gemini",), {"tools": [with_schema({"type": "string", "format": "date"})]}, "tools[0].function.parameters"),
]
"""What litellm has no form for."""


async def test_what_a_provider_would_not_be_asked_is_refused_by_name_and_nothing_is_sent(start: Any) -> None:
    async with start() as (proxy, bodies):
        for providers, fields, param in LEFT_OUT:
            for provider in providers:
                status, _, raw = await proxy.post({"model": provider, "messages": HI, **fields})
                assert (status, named(raw).startswith(param)) == (400, True), (provider, fields, raw)
        assert bodies == []


REACHES: dict[str, dict[str, Any]] = {
    "roles": {
        "messages": [
            *({"role": role, "content": f"{role} says\n"} for role in ("system", "developer", "user", "assistant")),
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}]},
        ]
    },
    "the same": {"messages": [*HI, {"role": "assistant", "content": "hi", "reasoning_content": "thought"}, *HI]},
    "sampling": {"temperature": 0.3, "top_p": 0.9, "max_tokens": 77, "stop": ["x", "y"], "user": "u", "n": 1},
    "tools": {"tools": [TOOL]},
    "results": {"messages": result({"type": "text", "text": 'a "quoted" one'}), "tools": [TOOL]},
    "results that are JSON": {
        "tools": [TOOL],
        "messages": result_of('{"temp": 21.5, "ok": true, "at": [1, 2], "of": {"a": null}}'),
    },
    "results that are spelt JSON": {
        "tools": [TOOL],
        "messages": result_of('{\n  "temp": "21",\n  "rows": [{"id": 1}, {"id": 2}]\n}'),
    },
    "results in parts that are JSON": {
        "messages": result({"type": "text", "text": '{"a": {"b": "text"}}'}),
        "tools": [TOOL],
    },
    "nothing as a result": {"messages": result_of("{}"), "tools": [TOOL]},
    "truths to choose from": {"tools": [with_schema({"type": "boolean", "enum": [True]})]},
    "what comes anyway": {
        **{"frequency_penalty": 0, "presence_penalty": 0.0, "logprobs": False, "service_tier": "auto", "store": False},
        **{"parallel_tool_calls": True, "tools": [TOOL]},
    },
    "hints": {
        "tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    },
    "numbers to choose from": {"tools": [with_schema({"type": "integer", "enum": [1, 2, 3]})]},
    "a number to choose in an answer": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {**SCHEMA, "properties": {"k": {"type": "integer", "enum": [4, 5]}}},
            },
        }
    },
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
}


async def test_what_providers_have_a_form_for_reaches_them(start: Any) -> None:
    async with start() as (proxy, bodies):
        for name, fields in REACHES.items():
            for provider in MODELS:
                before = len(bodies)
                _, _, raw = await proxy.post({"model": provider, "messages": HI, **fields})
                assert len(bodies) == before + 1, (provider, name, raw)


async def test_no_part_of_a_message_of_any_role_is_left_out_in_silence(start: Any) -> None:
    odd = {"type": "weird", "weird": MARK}
    kinds = {**parts("http://127.0.0.1:1", MARK), "of no known type": odd}
    spelt = (MARK, base64.b64encode(MARK.encode()).decode())
    async with start() as (proxy, bodies):
        for provider in MODELS:
            for kind, part in kinds.items():
                for role, messages in with_parts(part).items():
                    bodies.clear()
                    status, _, raw = await proxy.post({"model": provider, "messages": messages})
                    reached = any(one in body for one in spelt for body in bodies)
                    assert reached or (status == 400 and not bodies), (provider, kind, role, raw, bodies)
