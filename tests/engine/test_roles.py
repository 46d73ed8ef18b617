"""Roles are those of the messages that vLLM makes of a request, in its order: what it takes is counted as what it is.

vLLM's own functions make the messages; no engine is started.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages

from guard.proxy.body import parse_request
from guard.proxy.errors import InvalidRequestError
from guard.proxy.wire import Form
from guard.proxy.wire_messages import messages_form
from guard.proxy.wire_responses import responses_form

pytestmark = pytest.mark.engine

TEXTS = ("", "a", [{"type": "output_text", "text": "a"}], [{"type": "input_text", "text": "a"}], [{"type": "text"}], [])
ITEMS: list[dict[str, Any]] = [
    *({"role": role, "content": text} for role in ("user", "assistant", "system", "developer") for text in TEXTS),
    *({"type": "message", "role": role, "content": text} for role in ("user", "assistant") for text in TEXTS),
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
    {"type": "reasoning", "summary": []},
    {"type": "reasoning", "summary": [], "content": "a", "role": "user"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "role": "user", "content": "a"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "custom_tool_call_output", "call_id": "1", "output": "a", "role": "user", "content": "b"},
    {"type": "mcp_call", "id": "1", "name": "f", "server_label": "s", "arguments": "{}", "output": "a"},
    {
        "type": "mcp_call", "id": "1", "name": "f", "server_label": "s", "arguments": "{}", "role": "user",
        "content": "a",
    },
    {"type": "file_search_call", "id": "1", "queries": ["a"], "status": "completed", "results": [{"text": "a"}]},
    {"type": "web_search_call", "id": "1", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "additional_tools", "role": "developer", "tools": []},
]  # fmt: skip

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
NO_PICTURE = {"type": "image", "source": {"type": "url", "url": ""}}
RESULTS = ("", "a", [], [{"type": "text", "text": "a"}], [PICTURE], [NO_PICTURE], [{"type": "tool_reference"}],
           [PICTURE, {"type": "tool_reference", "tool_name": "f"}], [{"type": "tool_reference", "name": "f"}],
           [{"type": "document", "title": "a"}, {"type": "text", "text": "b"}])  # fmt: skip
BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "a"},
    {"type": "text", "text": ""},
    {"type": "thinking", "thinking": "a"},
    {"type": "redacted_thinking", "data": "a"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": "b"}, "text": "a"},
    {"type": "tool_reference", "tool_name": "f"},
    PICTURE,
    {"type": "image"},
    *({"type": "tool_result", "tool_use_id": "1", "content": one} for one in RESULTS),
    {"type": "document", "source": {"type": "text", "data": "a"}},
    {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
]
SYSTEMS = (None, "", "a", "x-anthropic-billing-header: a", [{"type": "text", "text": "x-anthropic-billing-header: a"}])


def responses_request(chance: random.Random) -> dict[str, Any]:
    instructions = {"instructions": chance.choice(["", "a"])} if chance.random() < 0.5 else {}
    return {"model": "m", "input": chance.choices(ITEMS, k=chance.randint(1, 6)), **instructions}


def messages_request(chance: random.Random) -> dict[str, Any]:
    messages = []
    for _ in range(chance.randint(1, 5)):
        role = chance.choices(["user", "assistant", "system"], [6, 3, 1])[0]
        content = "a" if chance.random() < 0.2 else chance.choices(BLOCKS, k=chance.randint(0, 4))
        messages.append({"role": role, "content": content})
    return {"model": "m", "max_tokens": 9, "messages": messages, "system": chance.choice(SYSTEMS)}


def of_responses(fields: dict[str, Any]) -> list[dict[str, Any]]:
    asked = ResponsesRequest(**fields)
    return list(construct_input_messages(request_instructions=asked.instructions, request_input=asked.input))  # type: ignore[arg-type]


def of_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    asked = AnthropicMessagesRequest(**fields)
    convert = AnthropicServingMessages.to_chat_completion_request
    first, last = (list(convert(asked, merge_inline_system=merge).messages) for merge in (True, False))
    assert first == last
    return first  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("form", "make", "made"),
    [(responses_form, responses_request, of_responses), (messages_form, messages_request, of_messages)],
    ids=["responses", "messages"],
)
def test_roles_are_those_of_the_messages_that_vllm_makes(
    form: Form, make: Callable[[random.Random], dict[str, Any]], made: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> None:
    chance, compared, refused = random.Random(7), 0, 0  # noqa: S311 - always the same
    for _ in range(4000):
        raw = json.dumps(make(chance))
        try:
            request = parse_request(form, raw.encode())
        except InvalidRequestError:
            refused += 1
            continue
        try:
            messages = made(json.loads(raw))
        except (ValidationError, ValueError, AttributeError, LookupError):
            continue  # vLLM refuses it
        compared += bool(messages)
        if messages:
            assert request.roles == tuple(message["role"] for message in messages), raw
    assert compared > 200
    assert refused > 200
