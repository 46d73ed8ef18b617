"""Attempts to get past a rule with what the same text alone would trip: spelt, placed, named or cut in another way."""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from detectors.base import Score
from guard.policy.judged_paths import EMBEDDINGS
from guard.proxy import body as body_module
from tests.proxy.conftest import BLOCKED, BODY, CLEAN, POLICY, Proxy, StartProxy
from tests.proxy.detectors import Words, register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_endpoints import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES, streams
from tests.proxy.test_streaming import DONE, chunk, chunks, finishes, policy, said

both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])

PROMPT_RULE = """\
version: 1
name: test
detectors:
  text: {kind: words}
rules:
  - {name: leak, when: {detector: text, at_least: 0.5}, action: block}
"""
USERS_RULE = PROMPT_RULE.replace("{kind: words}", "{kind: words, scope: user}")

ENCLOSED = {
    "letters in brackets": 0x249C,
    "capitals in brackets": 0x1F110,
    "letters in squares": 0x1F130,
    "letters in black circles": 0x1F150,
    "letters in black squares": 0x1F170,
    "letters that make flags": 0x1F1E6,
}
"""Where in Unicode the alphabet begins that is so drawn."""

NUMBERED = {
    "digits in brackets": 0x2474,
    "digits with a full stop": 0x2488,
    "digits with a comma": 0x1F102,
    "digits in two circles": 0x24F5,
    "digits in black circles": 0x2776,
    "digits in circles, without serifs": 0x2780,
    "digits in black circles, without serifs": 0x278A,
    "numbers in black circles": 0x24EB,
}
"""Where the digits from 1 on begin, or numbers of two digits."""

DISGUISES = {
    "Cyrillic letters that look the same": "\u0455\u0435\u0441ret",
    "Greek and Cyrillic ones": "s\u0435\u03f2r\u0435t",
    "zero-width spaces": "s\u200be\u200bc\u200br\u200be\u200bt",
    "zero-width joiners and a byte order mark": "se\u200dc\ufeffret",
    "soft hyphens": "sec\u00adret",
    "word joiners and invisible separators": "se\u2060c\u2063ret",
    "variation selectors": "se\ufe0fc\U000e0101ret",
    "Hangul fillers": "sec\u3164ret",
    "NUL and backspace": "sec\x00r\x08et",
    "right to left by force": "\u202eterces\u202c",
    "right to left by force, to the line's end": "a \u202eterces",
    "isolates around": "sec\u2067\u2069ret",
    "fullwidth forms": "\uff53\uff45\uff43\uff52\uff45\uff54",
    "bold mathematical letters": "".join(chr(0x1D41A + ord(one) - 97) for one in "secret"),
    "circled letters": "".join(chr(0x24D0 + ord(one) - 97) for one in "secret"),
    "small capitals": "s\u1d07\u1d04\u0280\u1d07\u1d1b",
    "accents in one character": "s\u00e9cr\u00ebt",
    "combining accents, many of them": "s" + "\u0301\u0316" * 20 + "e\u0336cret",
    "letters of the block of tags": "".join(chr(0xE0000 + ord(one)) for one in "secret"),
    "escaped as JSON does": "\\u0073e\\u0063ret",
    "escaped twice": "\\\\u0073ecret",
    "escaped, and Cyrillic": "\\u0455ecret",
    "a long s": "\u017fecret",
    "letters with hooks and strokes": "\u0282\u0247\u023c\u027d\u0247\u0167",
    "digits of another script": "\u0661\u0662\u0663\u0664",
    "Cyrillic letters of another shape in print": "secre\u0442",
    "Greek letters that look much the same": "s\u03b5cr\u03b5\u03c4",
    "letters turned and opened": "s\u01ddcr\u025bt",
    **{name: "".join(chr(first + ord(one) - 97) for one in "secret") for name, first in ENCLOSED.items()},
    "a musical sign without an image": "sec\U0001d159ret",
    "a sign for an object that is not there": "sec\ufffcret",
    **{name: "".join(chr(first + one) for one in range(4)) for name, first in NUMBERED.items()},
    "fullwidth digits": "\uff11\uff12\uff13\uff14",
}


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


async def outcomes(proxy: Proxy, bodies: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[int, str | None]]:
    """Status and the rule that decided, of each body at its path."""
    found = {}
    for name, (path, body) in bodies.items():
        status, headers, _ = await proxy.post(body, path=path)
        found[name] = status, headers.get("x-guard-rules")
    return found


async def test_no_spelling_hides_a_word_of_the_prompt(start_proxy: StartProxy) -> None:
    asked = {
        name: (CHAT, {**BODY, "messages": [{"role": "user", "content": f"say {text}!"}]})
        for name, text in DISGUISES.items()
    }
    innocent = ("se cret", "сек рет", "日本語のテキスト", "s\u00e9cr", "C:\\sec\\ret", "\u202esecret\u202c"[:4])
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        assert await outcomes(proxy, asked) == dict.fromkeys(DISGUISES, (400, "leak"))
        assert not engine.bodies
        for text in innocent:
            assert (await proxy.post({**BODY, "messages": [{"role": "user", "content": text}]}))[0] == 200


@pytest.mark.parametrize("contract", ["hold", "window"])
async def test_no_spelling_hides_a_word_of_the_answer(start_proxy: StartProxy, contract: str) -> None:
    text = policy(contract).replace("0.3", "30")
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, text) as proxy:
        for disguised in DISGUISES.values():
            half = len(disguised) // 2
            engine.scripts = [("well ", "", disguised[:half], disguised[half:], " so", " it", " is")]
            status, _, raw = await proxy.post({**BODY, "stream": True})
            assert status == 400 or (finishes(chunks(raw)) == {0: "content_filter"} and "so" not in said(chunks(raw)))
            assert disguised not in raw.decode()
            assert (await proxy.post(BODY))[0] == 400


async def test_what_is_disguised_is_redacted_where_it_stands_and_nothing_else(start_proxy: StartProxy) -> None:
    text = policy("hold", action="redact", more="    redact: {replacement: '[X]'}\n").replace("0.3", "30")
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, text) as proxy:
        for name, disguised in DISGUISES.items():
            if name.startswith("right to left"):
                continue
            engine.scripts = [("H\u00e4llo \u2014 ", disguised[:3], disguised[3:], " \u044f!")]
            for stream in (False, True):
                _, _, raw = await proxy.post({**BODY, "stream": stream})
                answer = said(chunks(raw)) if stream else json.loads(raw)["choices"][0]["message"]["content"]
                assert answer == "H\u00e4llo \u2014 [X] \u044f!", name


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def turn(**assistant: Any) -> dict[str, Any]:
    """A conversation with an assistant's message of these fields in it."""
    said_before = {"role": "assistant", "content": "yes", **assistant}
    return {**BODY, "messages": [*BODY["messages"], said_before, *BODY["messages"]]}


def called(arguments: Any, name: str = "f") -> dict[str, Any]:
    return turn(tool_calls=[{**CALL, "function": {"name": name, "arguments": arguments}}])


def call_with(**fields: Any) -> dict[str, Any]:
    return turn(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{}", **fields}}])


def content(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {**BODY, "messages": [{"role": role, "content": list(parts)}]}


def document(source: Any, **more: Any) -> dict[str, Any]:
    block = {"type": "document", "source": source, **more}
    return {**BODIES[MESSAGES], "messages": [{"role": "user", "content": [block]}]}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
USE = {"type": "tool_use", "id": "1", "name": "f"}
PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "a part": (CHAT, content({"type": "text", "text": "secret"})),
    "two parts, which templates may join": (CHAT, content({"text": "a sec"}, {"type": "text", "text": "ret b"})),
    "a part that is a text": (CHAT, content("secret")),
    "a part of another type": (CHAT, content({"type": "input_text", "text": "secret"})),
    "a thought": (CHAT, content({"type": "thinking", "thinking": "secret"}, role="assistant")),
    "a refusal": (CHAT, content({"type": "refusal", "refusal": "secret"}, role="assistant")),
    "a reference to a tool": (CHAT, content({"type": "tool_reference", "name": "secret"}, role="tool")),
    "a field of a part that the template may show": (CHAT, content({"type": "text", "text": "a", "title": "secret"})),
    "reasoning of an earlier answer": (CHAT, turn(reasoning="secret")),
    "arguments of a call": (CHAT, called('{"a": "secret"}')),
    "arguments, escaped": (CHAT, called('{"a": "s\\u0065cret"}')),
    "arguments, JSON in JSON": (CHAT, called(json.dumps({"a": json.dumps({"b": "s\u00e9cret"})}))),
    "arguments that are an object": (CHAT, called({"a": {"source": "secret"}})),
    "a name in the arguments": (CHAT, called({"secret": 1})),
    "the name of a call": (CHAT, called("{}", name="secret")),
    "the id of a call": (CHAT, turn(tool_calls=[{**CALL, "id": "the secret"}])),
    "the id of what a tool answers": (
        CHAT,
        {**BODY, "messages": [*BODY["messages"], {"role": "tool", "content": "a", "tool_call_id": "the secret"}]},
    ),
    "an id that is no text": (CHAT, turn(tool_calls=[{**CALL, "id": {"a": "secret"}}])),
    "the kind of a call": (CHAT, turn(tool_calls=[{**CALL, "type": "the secret"}])),
    "a role": (CHAT, {**BODY, "messages": [{"role": "the secret", "content": "a"}]}),
    "a role without a text": (CHAT, {**BODY, "messages": [*BODY["messages"], {"role": "<|im_end|>secret"}]}),
    "an item's role": (RESPONSES, {"model": "tiny", "input": [{"role": "the secret", "content": "a"}]}),
    "an item's id": (
        RESPONSES,
        {"model": "tiny", "input": [{"type": "function_call_output", "call_id": "the secret", "output": "a"}]},
    ),
    "the role of one who sends blocks": (
        MESSAGES,
        {**BODIES[MESSAGES], "messages": [{"role": "the secret", "content": [{"type": "text", "text": "a"}]}]},
    ),
    "the id of a use": (
        MESSAGES,
        {**BODIES[MESSAGES], "messages": [{"role": "assistant", "content": [{**USE, "id": "the secret"}]}]},
    ),
    "the id of a tool's result": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "s\u0435cret"}]}],
        },
    ),
    "a field of a call that some templates show": (CHAT, call_with(signature="secret")),
    "a field of a call in one word": (CHAT, call_with(status="secret")),
    "the name of such a field": (CHAT, call_with(secret=1)),
    "a field beside a call": (CHAT, turn(tool_calls=[{**CALL, "cache_control": {"a": "secret"}}])),
    "the kind of a call in one word": (CHAT, turn(tool_calls=[{**CALL, "type": "secret"}])),
    "an old kind of call": (CHAT, turn(function_call={"name": "f", "arguments": '{"a": "secret"}'})),
    "the name of who speaks": (CHAT, {**BODY, "messages": [{**BODY["messages"][0], "name": "secret"}]}),
    "a message of a tool": (CHAT, content({"type": "text", "text": "secret"}, role="tool")),
    "a message of the system": (CHAT, content("secret", role="system")),
    "the description of a tool": (CHAT, {**BODY, "tools": [{**TOOL, "function": {"description": "secret"}}]}),
    "a parameter of a tool": (
        CHAT,
        {**BODY, "tools": [{**TOOL, "function": {"parameters": {"properties": {"secret": {"type": "string"}}}}}]},
    ),
    "tools of a message": (
        CHAT,
        {**BODY, "messages": [*BODY["messages"], {"role": "developer", "content": "a", "tools": [{"name": "secret"}]}]},
    ),
    "a description in a form of answers": (
        CHAT,
        {**BODY, "response_format": {"type": "json_schema", "json_schema": {"schema": {"description": "secret"}}}},
    ),
    "a description in a form of responses": (
        RESPONSES,
        {**BODIES[RESPONSES], "text": {"format": {"type": "json_schema", "schema": {"description": "secret"}}}},
    ),
    "a document": (CHAT, {**BODY, "documents": [{"title": "t", "text": "secret"}]}),
    "a document's kind in one word": (CHAT, {**BODY, "documents": [{"type": "secret", "text": "a"}]}),
    "a document's data": (CHAT, {**BODY, "documents": [{"file_data": "secret"}]}),
    "a document's id": (CHAT, {**BODY, "documents": [{"id": "secret"}]}),
    "the name of a document's field": (CHAT, {**BODY, "documents": [{"secret": 1}]}),
    "a picture of a document": (CHAT, {**BODY, "documents": [{"text": "a", "source": {"image_url": "secret"}}]}),
    "a field of a tool for the engine": (CHAT, {**BODY, "tools": [{**TOOL, "cache_control": {"a": "secret"}}]}),
    "an argument of the template that is called as a picture": (
        CHAT, {**BODY, "chat_template_kwargs": {"image_url": "secret"}},
    ),
    "an argument of the template": (CHAT, {**BODY, "chat_template_kwargs": {"date_string": "secret"}}),
    "a prompt in a list": (COMPLETIONS, {"model": "tiny", "prompt": ["secret"]}),
    "the text after": (COMPLETIONS, {"model": "tiny", "prompt": "a", "suffix": "secret"}),
    "instructions": (RESPONSES, {**BODIES[RESPONSES], "instructions": "secret"}),
    "an item's arguments": (
        RESPONSES,
        {"model": "tiny", "input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": '"secret"'}]},
    ),
    "an item's name": (
        RESPONSES,
        {"model": "tiny", "input": [{"type": "function_call", "name": "secret", "call_id": "1", "arguments": "{}"}]},
    ),
    "an item's second text": (
        RESPONSES,
        {
            "model": "tiny",
            "input": [{"type": "reasoning", "content": [{"text": "a"}], "summary": [{"text": "secret"}]}],
        },
    ),
    "an item's group of tools": (
        RESPONSES,
        {
            "model": "tiny",
            "input": [{"type": "function_call", "namespace": "secret", "name": "f", "call_id": "1", "arguments": "{}"}],
        },
    ),
    "the system's part": (MESSAGES, {**BODIES[MESSAGES], "system": [{"type": "text", "text": "secret"}]}),
    "a system prompt that begins as one client's does": (
        MESSAGES,
        {**BODIES[MESSAGES], "system": "x-anthropic-billing-header: the secret"},
    ),
    "a block of the system's that vLLM leaves out, and others do not": (
        MESSAGES,
        {**BODIES[MESSAGES], "system": [{"type": "text", "text": "x-anthropic-billing-header: the secret"}]},
    ),
    "a plain document": (MESSAGES, document({"type": "text", "media_type": "text/plain", "data": "secret"})),
    "a document of parts": (
        MESSAGES,
        document({"type": "content", "content": [{"type": "text", "text": "secret"}]}),
    ),
    "a document of one text": (MESSAGES, document({"type": "content", "content": "secret"})),
    "a document's title": (MESSAGES, document({"type": "text", "data": "a"}, title="secret")),
    "where a result of a search is from": (MESSAGES, document("https://secret", type="search_result", content=[])),
    "a file's name": (CHAT, content({"type": "file", "file": {"filename": "secret"}})),
    "a block of thoughts": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "secret"}]}],
        },
    ),
    "a block's input": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [
                {"role": "assistant", "content": [{**USE, "input": {"a": ["secret"]}}]}
            ],
        },
    ),
    "a tool's result": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "secret"}]}
                    ],
                }
            ],
        },
    ),
    "a text to embed": (EMBEDDINGS, {"model": "tiny", "input": ["a", "s\u200becret"]}),
    "a message to embed": (EMBEDDINGS, {"model": "tiny", "messages": [{"role": "user", "content": "secret"}]}),
    "a message as input": (EMBEDDINGS, {"model": "tiny", "input": [{"role": "user", "content": "secret"}]}),
    "a part of a message as input": (
        EMBEDDINGS, {"model": "tiny", "input": [{"role": "user", "content": [{"type": "text", "text": "secret"}]}]},
    ),
    "beside messages as input": (
        EMBEDDINGS,
        {"model": "tiny", "input": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": "secret"}},
    ),
}  # fmt: skip


async def test_no_place_of_a_request_hides_a_word(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        assert await outcomes(proxy, PLACES) == dict.fromkeys(PLACES, (400, "leak"))
        assert not engine.bodies


NUMBER = 123456789
NUMBERS: dict[str, tuple[str, dict[str, Any]]] = {
    "of a tool's parameter": (
        CHAT,
        {**BODY, "tools": [{**TOOL, "function": {"parameters": {"properties": {"x": {"default": NUMBER}}}}}]},
    ),
    "of an argument of the template": (CHAT, {**BODY, "chat_template_kwargs": {"date_string": NUMBER}}),
    "with a point": (CHAT, {**BODY, "chat_template_kwargs": {"date_string": NUMBER / 4}}),
    "of a list": (CHAT, {**BODY, "chat_template_kwargs": {"dates": [1, NUMBER]}}),
    "of a list beside a text": (CHAT, {**BODY, "chat_template_kwargs": {"dates": ["a", NUMBER]}}),
    "of a list of lists": (CHAT, {**BODY, "chat_template_kwargs": {"dates": [[1], [NUMBER]]}}),
    "of a document": (CHAT, {**BODY, "documents": [{"text": NUMBER}]}),
    "that is a document": (CHAT, {**BODY, "documents": [NUMBER]}),
    "of a document in the template's arguments": (
        CHAT, {**BODY, "chat_template_kwargs": {"documents": [{"text": NUMBER}]}},
    ),
    "of a call": (CHAT, call_with(extra=NUMBER)),
    "that is a call's arguments": (CHAT, called(NUMBER)),
    "in a call's arguments": (CHAT, called({"a": NUMBER})),
    "that is a call's id": (CHAT, turn(tool_calls=[{**CALL, "id": NUMBER}])),
    "of a message": (CHAT, {**BODY, "messages": [{**BODY["messages"][0], "name": NUMBER}]}),
    "that is a message's text": (CHAT, {**BODY, "messages": [{"role": "user", "content": NUMBER}]}),
    "that is a part's text": (CHAT, content({"type": "text", "text": NUMBER})),
    "of a form of answers": (
        CHAT,
        {
            **BODY,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": NUMBER, "enum": [NUMBER]}}},
        },
    ),
    "of blocks' tools": (MESSAGES, {**BODIES[MESSAGES], "tools": [{"name": "f", "input_schema": {"default": NUMBER}}]}),
    "of a block's input": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [{"role": "assistant", "content": [{**USE, "input": {"a": NUMBER}}]}],
        },
    ),
    "of an item's tools": (
        RESPONSES,
        {**BODIES[RESPONSES], "tools": [{"type": "function", "name": "f", "parameters": {"default": NUMBER}}]},
    ),
    "beside a message to embed": (
        EMBEDDINGS,
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f", "x": NUMBER}]},
    ),
}  # fmt: skip
"""Numbers in requests, by where they stand."""


async def test_no_number_of_a_request_passes_unread(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        assert await outcomes(proxy, NUMBERS) == dict.fromkeys(NUMBERS, (400, "leak"))
        assert not engine.bodies
        sampling = {"max_tokens": NUMBER, "seed": NUMBER, "logit_bias": {"5": 1}, "stop_token_ids": [NUMBER]}
        assert (await proxy.post({**BODY, **sampling}))[0] == 200


async def test_true_and_false_are_read_where_templates_print_them(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(Words, "score_text", lambda self, text: read.append(text) or Score("scored", 0.0))
    body = {
        **BODY,
        "chat_template_kwargs": {"sure": True},
        "tools": [{**TOOL, "function": {"strict": True, "x": False}}],
    }
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        assert (await proxy.post(body))[0] == 200
    assert [line for line in read[0].split("\n") if line in ("true", "false")] == ["false", "true"]


async def test_a_redacted_number_is_nought_and_the_engine_takes_it(start_proxy: StartProxy) -> None:
    text = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [tool_results, assistant]}")
    call = {**CALL, "function": {"name": "f", "arguments": "{}", "extra": NUMBER, "sure": True, "list": [NUMBER, 5]}}
    asked = {**turn(tool_calls=[call]), "documents": [{"text": NUMBER, "at": 1.5}, NUMBER]}
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        assert (await proxy.post(asked))[0] == 200
    (sent,) = engine.bodies
    assert str(NUMBER) not in json.dumps(sent)
    function = sent["messages"][1]["tool_calls"][0]["function"]
    assert (function["extra"], function["sure"], function["list"]) == (0, False, [])


async def test_what_no_model_reads_as_text_trips_nothing(start_proxy: StartProxy) -> None:
    """Pictures have many digits in a row."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,secret1234567"}}
    asked = [
        content({"type": "text", "text": "a"}, picture),
        {
            **called("{}"),
            "tools": [TOOL],
            "user": "secret",
            "metadata": {"a": "secret"},
            "seed": 1234567,
            "stop": ["secret"],
        },
    ]
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        for body in asked:
            assert (await proxy.post(body))[0] == 200


@pytest.mark.parametrize("action", ["flag", "block"])
async def test_a_prompt_in_tokens_is_text_that_was_not_read_and_not_clean(start_proxy: StartProxy, action: str) -> None:
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "tokens": (COMPLETIONS, {"model": "tiny", "prompt": [5, 6, 7]}),
        "tokens in a list": (COMPLETIONS, {"model": "tiny", "prompt": [[5, 6, 7]]}),
        "tokens to embed": (EMBEDDINGS, {"model": "tiny", "input": [5, 6]}),
        "some texts and some tokens": (EMBEDDINGS, {"model": "tiny", "input": ["a", [5, 6]]}),
    }
    text = PROMPT_RULE + f"    on_error: {action}\n"
    text = text.replace("action: block}\n    on_error", "action: block, on_error").replace(
        f": {action}\n", f": {action}}}\n"
    )
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        found = await outcomes(proxy, asked)
        assert {status for status, _ in found.values()} == {200 if action == "flag" else 503}
        assert {entry["detectors"]["text"] for entry in await proxy.entries(4)} == {
            "unavailable: the prompt is given as tokens, whose text the guard does not have"
        }
        assert (await proxy.post({"model": "tiny", "prompt": "fine"}, path=COMPLETIONS))[1]["x-guard-action"] == "allow"
    embeds = {"type": "prompt_embeds", "prompt_embeds": "AAAA"}
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        status, _, raw = await proxy.post(content({"type": "text", "text": "a"}, embeds))
        assert (status, json.loads(raw)["error"]["param"]) == (400, "messages[0].content")


async def test_a_document_that_cannot_be_read_is_not_clean(start_proxy: StartProxy) -> None:
    data = "data:text/plain;base64,c2VjcmV0"
    base64 = {"type": "base64", "media_type": "application/pdf", "data": "c2VjcmV0"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": base64}]}
    asked = {
        "a file": (CHAT, content({"type": "file", "file": {"file_data": data}})),
        "a file elsewhere": (CHAT, content({"type": "file", "file": {"file_id": "f"}})),
        "an item's file": (
            RESPONSES,
            {"model": "tiny", "input": [{"role": "user", "content": [{"type": "input_file", "file_url": "http://a"}]}]},
        ),
        "a document": (MESSAGES, document(base64)),
        "a document elsewhere": (MESSAGES, document({"type": "url", "url": "http://a"})),
        "a tool's document": (MESSAGES, {**BODIES[MESSAGES], "messages": [{"role": "user", "content": [result]}]}),
        "a file to embed": (EMBEDDINGS, content({"type": "file", "file": {"file_id": "f"}})),
    }
    text = PROMPT_RULE.replace("action: block", "action: block, on_error: block")
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "secret"}}
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        assert {status for status, _ in (await outcomes(proxy, asked)).values()} == {503}
        assert not engine.bodies
        why = "a document or a file is in the prompt, whose text the guard does not have"
        found = {entry["detectors"]["text"] for entry in await proxy.entries(len(asked))}
        # Beside some there is a text, in which nothing was found.
        assert found == {f"unavailable: {why}", f"scored: {why}"}
        body = {**BODIES[MESSAGES], "messages": [{"role": "user", "content": [picture]}]}
        assert (await proxy.post(body, path=MESSAGES))[0] == 200


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a field of a message": (CHAT, turn(file_id="x")),
    "a field of a part": (CHAT, content({"type": "text", "text": "a", "file_url": "x"})),
    "a source of a part": (CHAT, content({"type": "text", "text": "a", "source": {"type": "x"}})),
    "a part of its own": (CHAT, content({"type": "text", "text": "a"}, {"type": "file", "file": {"file_id": "x"}})),
    "a block": (MESSAGES, document({"type": "url", "url": "http://a"})),
    "an item": (RESPONSES, {"model": "tiny", "input": [{"role": "user", "content": "a", "file_id": "x"}]}),
    "a message to embed": (EMBEDDINGS, content({"type": "text", "text": "a", "file_id": "x"})),
    "tokens": (COMPLETIONS, {"model": "tiny", "prompt": [5, 6, 7]}),
    "tokens to embed": (EMBEDDINGS, {"model": "tiny", "input": [5, 6, 7]}),
}
"""Requests of which something cannot be read."""


async def test_what_can_be_read_is_read_whatever_stands_beside_it_that_cannot(start_proxy: StartProxy) -> None:
    def beside(path: str, body: dict[str, Any]) -> dict[str, Any]:
        """With the word at other places of the same request, as everywhere else a rule reads it."""
        talk = "messages" if "messages" in body else "input"
        place = body.get(talk)
        if path != COMPLETIONS and isinstance(place, list) and isinstance(place[0], dict):
            return {**body, talk: [{"role": "user", "content": "a secret"}, *place]}
        return {**body, "suffix": "secret"}

    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        found = await outcomes(proxy, {name: (path, beside(path, body)) for name, (path, body) in UNREADABLE.items()})
        assert found == dict.fromkeys(UNREADABLE, (400, "leak"))
        assert not engine.bodies
        # Where nothing is found in what can be read, nobody knows: the rule's on_error.
        assert await outcomes(proxy, UNREADABLE) == dict.fromkeys(UNREADABLE, (200, "leak"))


async def test_a_low_score_of_what_can_be_read_is_not_below_a_bound(start_proxy: StartProxy) -> None:
    rule = PROMPT_RULE.replace("at_least: 0.5}, action: block", "below: 0.5}, action: redact, on_error: block")
    rule = rule.replace("on_error: block", "on_error: block, redact: {messages: [user]}")
    async with running(FakeEngine()) as engine, start_proxy(engine, rule) as proxy:
        assert {status for status, _ in (await outcomes(proxy, UNREADABLE)).values()} == {503}


async def test_a_field_for_a_file_that_is_null_is_nothing(start_proxy: StartProxy) -> None:
    """OpenAI's clients send such fields with pictures."""
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "file_id": None}
    empty = {"type": "text", "text": "a", "file": None, "source": None, "file_url": None, "file_data": None}
    asked = {
        "a picture": (RESPONSES, {"model": "tiny", "input": [{"role": "user", "content": [picture]}]}),
        "a part": (CHAT, content(empty)),
        "a file's field": (CHAT, content({**empty, "file": {"file_id": None}})),
        "a message": (MESSAGES, {**BODIES[MESSAGES], "messages": [{"role": "user", "content": "a", "file_id": None}]}),
    }
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        for name, (path, body) in asked.items():
            assert (await proxy.post(body, path=path))[1]["x-guard-action"] == "allow", name


IN_TOOLS_OR_ANSWERS = (
    "a thought", "a refusal", "a reference to a tool", "reasoning of an earlier answer", "arguments of a call",
    "arguments, escaped", "arguments, JSON in JSON", "arguments that are an object", "the name of a call",
    "an old kind of call", "a message of a tool", "a block of thoughts", "a block's input",
    "a tool's result", "a field of a call that some templates show", "a field beside a call",
)  # fmt: skip


async def test_what_is_redacted_stays_nowhere_in_its_message(start_proxy: StartProxy) -> None:
    text = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [tool_results, assistant]}")
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        for name in IN_TOOLS_OR_ANSWERS:
            path, body = PLACES[name]
            status, headers, _ = await proxy.post(body, path=path)
            assert (status, headers["x-guard-action"]) == (200, "redact"), name
            sent = json.dumps(engine.bodies[-1])
            assert "secret" not in sent, name
            assert "cret" not in sent, name
            assert "[removed by a guardrail]" in sent, name


async def test_a_redacted_id_still_joins_a_call_and_its_result(start_proxy: StartProxy) -> None:
    text = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [tool_results]}")
    body = turn(tool_calls=[{**CALL, "id": "the secret"}, CALL])
    body["messages"].append({"role": "tool", "content": "a", "tool_call_id": "the secret"})
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        assert (await proxy.post(body))[1]["x-guard-action"] == "redact"
        called, other = engine.bodies[0]["messages"][1]["tool_calls"]
        assert called["id"] == engine.bodies[0]["messages"][-1]["tool_call_id"]
        assert other["id"] == "call_1"
        assert "secret" not in json.dumps(engine.bodies)


async def test_a_redacted_role_that_nobody_knows_is_the_users(start_proxy: StartProxy) -> None:
    text = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [user]}")
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        await proxy.post({**BODY, "messages": [*BODY["messages"], {"role": "the secret", "content": "a"}]})
        sent = engine.bodies[0]["messages"]
        assert [one["role"] for one in sent] == ["user", "user"]
        assert "secret" not in json.dumps(sent)


ROLES = (
    "user",
    "User",
    "USER",
    " user",
    "human",
    "Human",
    "ipython",
    "tool_response",
    "",
    "\u0443ser",
    "system ",
    "x" * 99,
)


async def test_no_name_of_a_role_takes_a_message_out_of_a_scope(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, USERS_RULE) as proxy:
        for role in ROLES:
            alone = [{"role": role, "content": "secret"}]
            for messages in (alone, [*BODY["messages"], *alone], [*alone, *BODY["messages"]]):
                assert (await proxy.post({**BODY, "messages": messages}))[0] == 400, role
        for role in ("system", "developer", "assistant"):
            assert (await proxy.post({**BODY, "messages": [{"role": role, "content": "secret"}]}))[0] == 200
        assert (await proxy.entries(3 * len(ROLES) + 3))[-1]["detectors"]["text"].startswith("not_applicable")


@pytest.mark.parametrize("scope", ["user", "tool_results", "last_turn", "new_tool_results"])
async def test_a_message_of_a_role_that_nobody_knows_is_read_in_the_model(start_proxy: StartProxy, scope: str) -> None:
    text = POLICY.replace("{kind: probe}", f"{{kind: probe, scope: {scope}}}")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, text) as proxy:
        assert (await proxy.post({**BODY, "messages": [{"role": "human", "content": "attack"}]}))[0] == 400
        assert engine.specs[0] is not None
        assert "danger.layer3" in engine.specs[0]["hidden"]


@both
@pytest.mark.parametrize("contract", ["hold", "window"])
async def test_one_bad_choice_among_many_spoils_the_answer(
    start_proxy: StartProxy, contract: str, stream: bool
) -> None:
    number, bad = 8, 5
    words = [[f"w{i} " for i in range(6)] for _ in range(number)]
    words[bad] = ["w0 ", "w1 ", "w2 ", "sec", "ret", " w5"]
    parts = [chunk(i, {"content": words[i][j]}) for j in range(6) for i in range(number)]
    ends = [chunk(i, {}, "stop") for i in range(number)]
    message = {"role": "assistant"}
    choices = [
        {"index": i, "message": {**message, "content": "".join(words[i])}, "finish_reason": "stop"}
        for i in range(number)
    ]
    whole = json.dumps({"id": "c", "choices": choices}).encode()
    engine = FakeEngine(frames=[*parts, *ends, DONE], body=whole, logit=CLEAN, word_delay_s=0.01)
    async with running(engine), start_proxy(engine, policy(contract)) as proxy:
        status, _, raw = await proxy.post({**BODY, "n": number, "stream": stream})
        assert b"ret" not in raw
        assert status == (200 if stream and contract == "window" else 400)
        if status == 200:
            assert finishes(chunks(raw)) == dict.fromkeys(range(number), "content_filter")
        assert (await proxy.entry())["answer"]["choice"] == bad


@pytest.mark.parametrize("window", [1, 2, 5, 4096])
async def test_however_small_the_window_the_token_that_completes_a_match_never_leaves(
    start_proxy: StartProxy, window: int
) -> None:
    text = policy("window").replace("window_tokens: 3", f"window_tokens: {window}")
    engine = FakeEngine(scripts=[tuple("and a secret, too, is this.")], word_delay_s=0.003)
    async with running(engine), start_proxy(engine, text) as proxy:
        status, _, raw = await proxy.post({**BODY, "stream": True})
        released = "" if status == 400 else said(chunks(raw))
        assert "and a secret, too".startswith(released)
        assert len(released) <= max(0, len("and a secret") - window)
        # A burst: more in one piece than the window holds.
        engine.word_delay_s = 0.0
        engine.frames = [
            b"".join(chunk(0, {"content": one}) for one in "and a secret, too"),
            chunk(0, {}, "stop"),
            DONE,
        ]
        status, _, raw = await proxy.post({**BODY, "stream": True})
        assert status == 400 or "secret" not in said(chunks(raw))


async def test_a_word_at_the_end_of_a_huge_context_is_found(start_proxy: StartProxy) -> None:
    filler = [{"role": ("user", "assistant")[i % 2], "content": "lorem ipsum " * 300} for i in range(600)]
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        for word in ("secret", "s\u200becret"):
            body = {**BODY, "messages": [*filler, {"role": "user", "content": word}]}
            assert len(json.dumps(body)) > 2_000_000
            assert (await proxy.post(body))[0] == 400
        assert (await proxy.post({**BODY, "messages": filler}))[0] == 200
        assert len(engine.bodies) == 1


def shown(*tokens: str, others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Logprobs of these tokens, with others of which one more was likely at each."""
    likely = [[{"token": one, "logprob": -2.0, "bytes": None}] for one in others] or [[] for _ in tokens]
    return {
        "content": [
            {"token": one, "logprob": -1.0, "bytes": None, "top_logprobs": more}
            for one, more in zip(tokens, likely, strict=True)
        ]
    }


BEYOND: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "logprobs of a stop word": ({"logprobs": shown("ok", " sec", "ret")}, {}),
    "the likely tokens that were not said": ({"logprobs": shown("a", "b", "c", others=("x", "sec", "ret"))}, {}),
    "characters of several tokens": (
        {
            "logprobs": {
                "content": [
                    {"token": "\ufffd", "bytes": [0xD1], "top_logprobs": []},
                    {"token": "\ufffdecret", "bytes": [0x95, *b"ecret"], "top_logprobs": []},
                ]
            }
        },
        {},
    ),
    "the stop word": ({"stop_reason": "ret"}, {"content": "ok sec"}),
    "the stop word alone": ({"stop_reason": "secret"}, {}),
}


@both
@pytest.mark.parametrize("contract", ["hold", "window"])
@pytest.mark.parametrize("name", list(BEYOND))
async def test_what_a_model_said_beyond_the_text_is_judged_too(
    start_proxy: StartProxy, name: str, contract: str, stream: bool
) -> None:
    beside, text = BEYOND[name]
    message = {"role": "assistant", "content": "ok", **text}
    whole = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop", **beside}]}
    parts = [
        chunk(0, {"content": message["content"]}),
        chunk(0, {}, logprobs=beside.get("logprobs")),
        chunk(0, {}, "stop", **{key: value for key, value in beside.items() if key != "logprobs"}),
        DONE,
    ]
    # The words of a text that is held back come later than its logprobs, if at all.
    engine = FakeEngine(frames=parts, body=json.dumps(whole).encode(), word_delay_s=0.01)
    async with running(engine), start_proxy(engine, policy(contract)) as proxy:
        status, _, raw = await proxy.post({**BODY, "stream": stream})
        assert b"ret" not in raw
        assert status == 400 or finishes(chunks(raw)) == {0: "content_filter"}
        text_of_redaction = policy(contract, action="redact", more="    redact: {replacement: '[X]'}\n")
    async with running(engine), start_proxy(engine, text_of_redaction) as proxy:
        status, _, raw = await proxy.post({**BODY, "stream": stream})
        assert status == 200
        assert b"ecret" not in raw
        assert b"ret" not in raw


def choice(**message: Any) -> bytes:
    message = {"role": "assistant", "content": None, **message}
    return json.dumps({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


def item(kind: str, **more: Any) -> bytes:
    return json.dumps({"id": "r", "object": "response", "output": [{"type": kind, **more}]}).encode()


FIELDS: dict[str, tuple[str, bytes]] = {
    "a custom tool's input": (CHAT, choice(tool_calls=[{"type": "custom", "custom": {"input": "secret"}}])),
    "what is spoken": (CHAT, choice(audio={"id": "a", "data": "", "transcript": "secret"})),
    "details of reasoning": (CHAT, choice(reasoning_details=[{"type": "reasoning.text", "text": "secret"}])),
    "code": (RESPONSES, item("code_interpreter_call", code="secret")),
    "what code wrote": (RESPONSES, item("code_interpreter_call", outputs=[{"type": "logs", "logs": "secret"}])),
    "a search": (RESPONSES, item("web_search_call", action={"type": "search", "query": "secret"})),
    "a command": (RESPONSES, item("local_shell_call", action={"type": "exec", "command": ["echo", "secret"]})),
    "what a tool elsewhere says": (RESPONSES, item("mcp_call", arguments="{}", output="secret")),
    "a stop word": (MESSAGES, json.dumps({"type": "message", "content": [], "stop_sequence": "secret"}).encode()),
}


async def test_no_field_of_an_answer_hides_a_word(start_proxy: StartProxy) -> None:
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, policy("hold")) as proxy:
        for name, (path, engine.body) in FIELDS.items():
            assert (await proxy.post(BODIES[path], path=path))[0] == 400, name


def block(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": 0, "content_block": {"type": kind, **more}}


AT = {"item_id": "m", "output_index": 0, "content_index": 0}
UNUSUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "annotations": (CHAT, {"delta": {"annotations": [{"type": "url_citation", "url_citation": {"title": "secret"}}]}}),
    "thoughts in blocks": (CHAT, {"delta": {"thinking_blocks": [{"type": "thinking", "thinking": "secret"}]}}),
    "a picture's address": (CHAT, {"delta": {"images": [{"image_url": {"url": "https://secret"}}]}}),
    "a provider's own fields": (CHAT, {"delta": {"provider_specific_fields": {"a": [{"b": "secret"}]}}}),
    "words in parts": (CHAT, {"delta": {"content": [{"type": "text", "text": "secret"}]}}),
    "numbers in what was parsed": (CHAT, {"delta": {"parsed": {"a": 123456789}}}),
    "a number that was parsed": (CHAT, {"delta": {"parsed": 123456789}}),
    "numbers that were parsed": (CHAT, {"delta": {"parsed": ["a", 123456789]}}),
    "a number for words": (CHAT, {"delta": {"content": 123456789}}),
    "a number for a call's arguments": (
        CHAT, {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": 123456789}}]}},
    ),
    "a call's id": (CHAT, {"delta": {"tool_calls": [{"index": 0, "id": "functions.secret:0", "function": {}}]}}),
    "a kind that is none": (CHAT, {"delta": {"type": "a secret"}}),
    "no text, and words": (CHAT, {"text": None, "delta": {"content": "secret"}}),
    "a message and a delta": (CHAT, {"delta": {"content": "a"}, "message": {"content": "secret"}}),
    "a field of tomorrow": (CHAT, {"tomorrow": [[{"x": "secret"}]]}),
    "what was likely in the prompt": (CHAT, {"prompt_logprobs": [None, {"5": {"decoded_token": "secret"}}]}),
    "data that is none": (CHAT, {"delta": {"audio": {"id": "a", "data": "secret"}}}),
    "why it ended, in one word": (CHAT, {"delta": {}, "finish_reason": "secret"}),
    "a provider's word for it": (CHAT, {"delta": {}, "native_finish_reason": "secret"}),
    "experts that are none": (CHAT, {"delta": {}, "routed_experts": "a secret"}),
    "words of a usage": (RESPONSES, {"type": "response.completed", "response": {"usage": {"a": "secret"}}}),
    "a field of a text's choice": (COMPLETIONS, {"text": "a", "tomorrow": "secret"}),
    "an annotation": (
        RESPONSES, {"type": "response.output_text.annotation.added", **AT, "annotation": {"title": "secret"}},
    ),
    "annotations of a part": (
        RESPONSES,
        {"type": "response.content_part.done", **AT, "part": {"text": "a", "annotations": [{"title": "secret"}]}},
    ),
    "tools elsewhere": (
        RESPONSES,
        {
            "type": "response.output_item.done",
            "item": {"type": "mcp_list_tools", "tools": [{"name": "f", "description": "secret"}]},
        },
    ),
    "a failure": (RESPONSES, {"type": "response.failed", "response": {"error": {"message": "secret"}}}),
    "raw output": (RESPONSES, {"type": "response.completed", "response": {"output_messages": [{"message": "secret"}]}}),
    "an event of tomorrow": (RESPONSES, {"type": "response.tomorrow.delta", "delta": {"x": ["secret"]}}),
    "a citation": (
        MESSAGES,
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {"a": "secret"}}},
    ),
    "what a search found": (MESSAGES, block("web_search_tool_result", content=[{"title": "secret"}])),
    "content at once": (
        MESSAGES, {"type": "message_start", "message": {"content": [{"type": "text", "text": "secret"}]}},
    ),
    "the id of a tool's use": (MESSAGES, block("tool_use", id="secret", name="f", input={})),
}  # fmt: skip


def unusual(path: str, one: dict[str, Any]) -> list[bytes]:
    """Frames of a stream that has it between its first frame and its others."""
    first, *others = streams(path, ("ok", " fine"))
    if path in (CHAT, COMPLETIONS):
        return [first, b"data: " + json.dumps({"choices": [{"index": 0, **one}]}).encode() + b"\n\n", *others]
    event = f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode()
    # These end a stream.
    ends = one["type"] in ("response.failed", "response.completed")
    return [first, *([*others[:-1], event] if ends else [event, *others])]


@pytest.mark.parametrize("action", ["block", "redact"])
@pytest.mark.parametrize("contract", ["hold", "window"])
async def test_no_field_of_a_streams_events_hides_a_word(start_proxy: StartProxy, contract: str, action: str) -> None:
    engine = FakeEngine()
    more = "    redact: {replacement: '[X]'}\n" if action == "redact" else ""
    async with running(engine), start_proxy(engine, policy(contract, action=action, more=more)) as proxy:
        for number, (name, (path, one)) in enumerate(UNUSUAL.items(), start=1):
            engine.frames = unusual(path, one)
            status, _, raw = await proxy.post({**BODIES[path], "stream": True}, path=path)
            assert not [one for one in (b"secret", b"123456789") if one in raw], name
            assert (await proxy.entries(number))[-1]["action"] == action, name
            # Nothing of a window's answer may have left yet.
            assert status in {("hold", "block"): (400,), ("window", "block"): (200, 400)}.get(
                (contract, action), (200,)
            ), name


SPELLINGS = (
    '{"x": "the secret word"}',
    '{"x":"the secret word"}',
    '{\n  "x" :   "the secret word"\n}',
    '{"x": "the s\u200becret word"}',
    '{"a": 1234567, "x": "the SECRET word, secret"}',
    '{"x": "the word"}',
    "nothing",
)
"""Of one text, as a server may write it each time that it sends it."""


def told_again(kind: str, spelt: list[str], name: str) -> list[bytes]:
    """A stream of a response whose text comes in parts, at its end, in its part, in its item and in the response, each
    time in the spelling of that place."""
    parts, ended, of_part, of_item, at_last = spelt
    at = {"item_id": "m", "output_index": 0}
    pieces = [parts[i : i + 3] for i in range(0, len(parts), 3)]

    def item(text: str) -> dict[str, Any]:
        if kind == "call":
            return {"type": "function_call", "id": "m", "call_id": "call_1", "name": name, "arguments": text}
        return {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": text}]}

    if kind == "call":
        called = "response.function_call_arguments"
        said = [{"type": f"{called}.delta", **at, "delta": one} for one in pieces]
        said.append({"type": f"{called}.done", **at, "arguments": ended, "name": name})
    else:
        at["content_index"] = 0
        said = [{"type": "response.output_text.delta", **at, "delta": one} for one in pieces]
        said.append({"type": "response.output_text.done", **at, "text": ended})
        said.append({"type": "response.content_part.done", **at, "part": {"type": "output_text", "text": of_part}})
    whole = {"id": "r", "object": "response", "status": "completed", "output": [item(at_last)]}
    values = [
        *said,
        {"type": "response.output_item.done", "output_index": 0, "item": item(of_item)},
        {"type": "response.completed", "response": whole},
    ]
    return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in values]


@pytest.mark.parametrize("contract", ["hold", "window"])
@pytest.mark.parametrize("kind", ["call", "message"])
async def test_a_text_that_comes_again_is_redacted_as_it_is_spelt_there(
    start_proxy: StartProxy, kind: str, contract: str
) -> None:
    """As vLLM spells a call's arguments with other spaces in a response's last event than in its stream."""
    found = re.compile(r"(?i)s\u200b?ecret|\d{4,}")
    rules = policy(contract, action="redact", more="    redact: {replacement: '[X]'}\n")
    chance = random.Random(5)  # noqa: S311
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, rules) as proxy:
        for _ in range(12):
            spelt, name = chance.choices(SPELLINGS, k=5), chance.choice(["lookup", "secret_one"])
            engine.frames = told_again(kind, spelt, name)
            status, _, raw = await proxy.post({**BODIES[RESPONSES], "stream": True}, path=RESPONSES)
            assert status == 200
            got = [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]
            sent = [json.loads(frame.split(b"data: ")[1]) for frame in engine.frames]
            deltas = "".join(one.get("delta", "") for one in got)
            if contract == "hold":
                assert deltas == found.sub("[X]", spelt[0])
            others = [[one for one in many if "delta" not in one] for many in (got, sent)]
            assert others[0] == json.loads(found.sub("[X]", json.dumps(others[1], ensure_ascii=False))), (spelt, name)


SAID = b'data: {"choices": [{"index": 0, "delta": {"content": "ok"}}]}\n\n'
LINES: dict[str, tuple[bytes, bool]] = {
    "an event's name": (b"event: secret\n" + SAID, True),
    "an event's name without a space": (b"event:secret\n" + SAID, True),
    "an id": (b"id: secret\n" + SAID, True),
    "a comment inside": (b": secret\n" + SAID, True),
    "a line that is none": (b"secret\n" + SAID, True),
    "a name of nothing": (b"event: secret\n\n", True),
    "a byte order mark": (b"\xef\xbb\xbf" + SAID.replace(b"ok", b"secret"), False),
    "a key twice": (SAID.replace(b'"content": "ok"', b'"content": "secret", "content": "ok"'), False),
    "a key twice, at the top": (SAID.replace(b"}]}", b'}], "choices": []}').replace(b"ok", b"secret"), False),
}
"""Frames, and whether an answer that has one goes on without what nobody read."""


@pytest.mark.parametrize("contract", ["hold", "window"])
async def test_no_line_of_a_stream_passes_unread(start_proxy: StartProxy, contract: str) -> None:
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, policy(contract)) as proxy:
        for name, (frame, goes_on) in LINES.items():
            engine.frames = [frame, SAID, DONE]
            status, _, raw = await proxy.post({**BODY, "stream": True})
            assert b"secret" not in raw, name
            assert (status, b"[DONE]" in raw) == (200, True) if goes_on else b"cannot be read" in raw, name


async def test_an_answer_with_a_key_twice_is_not_passed_on(start_proxy: StartProxy) -> None:
    engine = FakeEngine(body=choice(content="ok").replace(b'"content"', b'"content": "secret", "content"'))
    async with running(engine), start_proxy(engine, policy("hold")) as proxy:
        status, _, raw = await proxy.post()
        assert (status, b"secret" in raw) == (502, False)


async def test_what_is_no_text_of_an_answer_is_not_read_and_none_of_it_changed(start_proxy: StartProxy) -> None:
    noise = {
        "id": "chatcmpl-0123456789abcdef", "model": "secret", "system_fingerprint": "secret",
        "usage": {"total_tokens": 5},
        "choices": [{"index": 0, "finish_reason": "stop", "routed_experts": "secret" * 9, "message": {
            "role": "secret", "content": "ok",
            "tool_calls": [{"type": "secret", "id": "chatcmpl-tool-0123456789abcdef", "function": {"name": "f"}}],
            "audio": {"id": "a", "data": "secret" * 9}, "images": [{"url": "data:image/png;base64,secret"}],
        }}],
    }  # fmt: skip
    echo = {"id": "r", "object": "response", "output": [], "instructions": "secret", "metadata": {"a": "secret"}}
    everything = policy("hold", action="redact", more="    redact: {replacement: '[X]'}\n").replace(
        "{detector: text, at_least: 0.5}", "{detector: text, at_least: 0}"
    )
    engine = FakeEngine()
    async with running(engine), start_proxy(engine, everything) as proxy:
        for path, value in ((CHAT, noise), (RESPONSES, echo)):
            engine.body = json.dumps(value).encode()
            status, _, raw = await proxy.post(BODIES[path], path=path)
            got = json.loads(raw)
            assert status == 200
            for choice_got, choice_sent in zip(got.get("choices", ()), value.get("choices", ()), strict=True):
                assert choice_got["message"].pop("content") == "[X]"
                choice_sent["message"].pop("content")
                assert choice_got["message"]["tool_calls"][0]["function"].pop("name") == "[X]"
                choice_sent["message"]["tool_calls"][0]["function"].pop("name")
            assert got == value


async def test_what_several_choices_share_is_taken_out_of_each(start_proxy: StartProxy) -> None:
    both_at_once = {
        "beside": {"note": "a secret and a secret"},
        "choices": [{"index": i, "delta": {"content": "ok"}, "finish_reason": None} for i in range(2)],
    }
    engine = FakeEngine(frames=[b"data: " + json.dumps(both_at_once).encode() + b"\n\n", DONE])
    rules = policy("hold", action="redact", more="    redact: {replacement: ''}\n")
    async with running(engine), start_proxy(engine, rules) as proxy:
        assert b"secret" not in (await proxy.post({**BODY, "n": 2, "stream": True}))[2]


IDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "ids of a chat": (CHAT, {}, {"token_ids": [5, 6]}, False),
    "ids with a stop word": (COMPLETIONS, {"stop": ["ret"]}, {"token_ids": [5, 6]}, False),
    "ids with a stop token": (COMPLETIONS, {"stop_token_ids": [6]}, {"token_ids": [5, 6]}, False),
    "the stop token": (CHAT, {"stop_token_ids": [6]}, {"stop_reason": [5, 6]}, False),
    "logprobs by id": (CHAT, {"return_tokens_as_token_ids": True}, {"logprobs": {"content": [5, 6]}}, False),
    "ids of a text that is all": (COMPLETIONS, {}, {"token_ids": [5, 6]}, True),
}


@both
@pytest.mark.parametrize("name", list(IDS))
async def test_token_ids_beyond_the_text_never_leave_and_others_do(
    start_proxy: StartProxy, name: str, stream: bool
) -> None:
    path, asked, shown_ids, leaves = IDS[name]
    text = {"text": "ok"} if path == COMPLETIONS else {"delta": {"content": "ok"}, "message": {"content": "ok"}}
    one = {"id": "c", "choices": [{"index": 0, "finish_reason": "stop", **text, **shown_ids}]}
    engine = FakeEngine(frames=[b"data: " + json.dumps(one).encode() + b"\n\n", DONE], body=json.dumps(one).encode())
    async with running(engine), start_proxy(engine, policy("hold")) as proxy:
        status, _, raw = await proxy.post({**BODIES[path], **asked, "stream": stream}, path=path)
        assert (status, b"[5" in raw) == (200, leaves)


ONE = {"role": "user", "content": "a"}
CROWDS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "parts": (CHAT, content(*["a"] * 300_000), "messages"),
    "parts of many messages": (CHAT, {**BODY, "messages": [{**ONE, "content": ["a"] * 11}] * 2000}, "messages"),
    "messages": (CHAT, {**BODY, "messages": [{"role": "u", "content": ""}] * 100_000}, "messages"),
    "tools": (CHAT, {**BODY, "tools": [{}] * 500_000}, "tools"),
    "functions": (CHAT, {**BODY, "functions": [{}] * 3_000}, "functions"),
    "names in a tool": (CHAT, {**BODY, "tools": [{f"{i:x}": "" for i in range(300_000)}]}, None),
    "lists in lists": (CHAT, {**BODY, "documents": [[[]] * 200_000]}, None),
    "texts to complete": (COMPLETIONS, {"model": "tiny", "prompt": "a", "stop": ["a"] * 200_000}, None),
    "items": (RESPONSES, {"model": "tiny", "input": [ONE] * 20_000}, "input"),
    "an item's parts": (RESPONSES, {"model": "tiny", "input": [{**ONE, "content": ["a"] * 30_000}]}, "messages"),
    "blocks": (MESSAGES, {**BODIES[MESSAGES], "messages": [{**ONE, "content": [{}] * 30_000}]}, "messages"),
    "texts to embed": (EMBEDDINGS, {"model": "tiny", "input": ["a"] * 200_000}, None),
}
RESULTS = [{"type": "tool_result", "tool_use_id": "1", "content": "a"}] * 9_000
MOST: dict[str, tuple[str, dict[str, Any]]] = {
    "parts": (CHAT, content(*["a"] * 19_000)),
    "tokens": (COMPLETIONS, {"model": "tiny", "prompt": [5] * 500_000}),
    "results of tools": (MESSAGES, {**BODIES[MESSAGES], "messages": [{**ONE, "content": [*RESULTS, ONE]}]}),
    "one long text": (CHAT, content("a" * 8_000_000)),
}


async def test_a_request_of_too_many_parts_is_refused_and_nobody_else_waits(start_proxy: StartProxy) -> None:
    waits_s: list[float] = []

    async def watch(proxy: Proxy) -> None:
        while True:
            began_s = time.perf_counter()
            await proxy.get("/livez")
            waits_s.append(time.perf_counter() - began_s)

    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        watching = asyncio.create_task(watch(proxy))
        for name, (path, body, field) in CROWDS.items():
            status, _, raw = await proxy.post(json.dumps(body).encode(), path=path)
            error = json.loads(raw)["error"]
            assert (status, error["param"]) == (400, field), name
            assert "at most" in error["message"] or "more than" in error["message"], name
        assert not engine.bodies
        for name, (path, body) in MOST.items():
            assert (await proxy.post(json.dumps(body).encode(), path=path))[0] == 200, name
        watching.cancel()
    assert max(waits_s) < 4


MANY, NOTHING = ["secret"] * 2000, {"x": [{}] * 90_000}
NAMES = {f"x{i}": "" for i in range(40_000)}
TALKS = [[{"role": "user", "content": "secret"}]] * 2000
COPIED: dict[str, tuple[str, dict[str, Any], int]] = {
    "texts beside each text": (EMBEDDINGS, {"input": ["hi"] * 600, "documents": [""] * 18_000}, 400),
    "texts beside each of some": (EMBEDDINGS, {"input": ["hi"] * 200, "documents": [""] * 90_000}, 400),
    "texts beside each conversation": (EMBEDDINGS, {"messages": TALKS, "documents": [""] * 18_000}, 400),
    "values beside each text": (EMBEDDINGS, {"input": ["hi"] * 2000, "documents": [{}] * 90_000}, 400),
    "fields that are not read": (EMBEDDINGS, {"input": MANY, **NOTHING}, 200),
    "names that are not read": (EMBEDDINGS, {"input": MANY, **NAMES}, 200),
    "fields beside conversations": (EMBEDDINGS, {"messages": TALKS, **NOTHING}, 200),
    "names beside conversations": (EMBEDDINGS, {"input": TALKS, **NAMES}, 200),
    "fields of a chat": (CHAT, {**content({"type": "text", "text": "secret"}), **NOTHING}, 200),
    "parts of a chat": (CHAT, content(*["secret"] * 19_000), 200),
}
"""Requests that are redacted, and would be large if all of them were copied or read for each prompt."""


async def test_what_many_prompts_have_beside_them_costs_nobody_else_time(start_proxy: StartProxy) -> None:
    waits_s: dict[str, float] = {}
    name = ""

    async def watch(proxy: Proxy) -> None:
        while True:
            began_s = time.perf_counter()
            await proxy.get("/livez")
            waits_s[name] = max(waits_s.get(name, 0.0), time.perf_counter() - began_s)

    redacting = PROMPT_RULE.replace("action: block", "action: redact, redact: {messages: [user, tool]}")
    async with running(FakeEngine()) as engine, start_proxy(engine, redacting) as proxy:
        watching = asyncio.create_task(watch(proxy))
        for name, (path, body, expected) in COPIED.items():
            async with asyncio.timeout(20):
                status, _, raw = await proxy.post(json.dumps({"model": "tiny", **body}).encode(), path=path)
            assert status == expected, name
            assert status == 200 or "at most" in json.loads(raw)["error"]["message"], name
            assert b"secret" not in json.dumps(engine.bodies).encode(), name
            assert status == 400 or engine.bodies.pop().keys() == {"model", *body} - {"vllm_xargs"}, name
        watching.cancel()
    assert max(waits_s.values()) < 2, waits_s


@both
async def test_a_long_body_is_searched_and_written_where_nobody_waits(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """As it came, counted and redacted."""
    done: list[tuple[str, threading.Thread]] = []

    def noted(name: str) -> None:
        of_old = getattr(body_module, name)

        def work(*given: Any) -> Any:
            if len(str(given)) > 64 * 1024:
                done.append((name, threading.current_thread()))
            return of_old(*given)

        monkeypatch.setattr(body_module, name, work)

    for name in ("may_mark_turns", "marks_turns", "_json"):
        noted(name)
    rules = policy("window").replace("rules:\n", PROMPT_RULE[PROMPT_RULE.index("  - {name: leak") :], 1)
    rules = rules.replace("  - {name: leak", "rules:\n  - {name: told", 1)
    rules = rules.replace("action: block}\n", "action: redact, redact: {messages: [user]}}\n", 1)
    asked = {**BODY, "stream": stream, "stream_options": {"include_usage": True}} if stream else BODY
    async with running(FakeEngine()) as engine, start_proxy(engine, rules.replace("0.3", "30")) as proxy:
        for text in ("|< fine " * 10_000, "|< secret " * 10_000):
            long = {"role": "assistant", "content": "|< fine " * 10_000}
            messages = [long, {"role": "user", "content": text}]
            assert (await proxy.post({**asked, "messages": messages}))[0] == 200
    assert "secret" not in json.dumps(engine.bodies[-1])
    assert {name for name, _ in done} == {"may_mark_turns", "marks_turns", "_json"}
    assert threading.main_thread() not in {thread for _, thread in done}


async def test_no_request_slips_through_while_policies_that_all_forbid_it_are_swapped(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, PROMPT_RULE) as proxy:
        versions, ended = set(), asyncio.Event()

        async def swap() -> None:
            for i in range(12):
                (tmp_path / "policy.yaml").write_text(PROMPT_RULE.replace("0.5", f"0.5{i}"))
                await asyncio.sleep(0.08)
            ended.set()

        async def ask() -> None:
            while not ended.is_set():
                status, headers, _ = await proxy.post({**BODY, "messages": [{"role": "user", "content": "secret"}]})
                assert (status, headers["x-guard-rules"]) == (400, "leak")
                versions.add(headers["x-guard-policy"])

        await asyncio.gather(swap(), *(ask() for _ in range(4)))
        assert len(versions) > 1
        assert not engine.bodies
