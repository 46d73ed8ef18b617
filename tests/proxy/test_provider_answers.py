"""What comes of other providers' answers, errors and silence, with the real litellm between."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from guard.proxy.provider_request import CHAT, COMPLETIONS, NUMBERED
from tests.proxy.conftest import Proxy, StartProxy
from tests.proxy.engine import FakeEngine
from tests.proxy.far import ELSEWHERE, ENDS, KEY, MODELS, MORE, OPENAIS, Far, chunk, event, far_away, stream, whole

pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")
pytestmark = pytest.mark.usefixtures("one_process")

POLICY = """\
version: 1
name: none
detectors: {d: {kind: probe}}
rules: [{name: all, when: {detector: d, at_least: 0.9}, action: flag}]
"""
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def start(start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FAR_KEY", KEY)

    @asynccontextmanager
    async def start() -> AsyncIterator[tuple[Proxy, Far]]:
        async with (
            far_away(tmp_path) as (far, path),
            start_proxy(FakeEngine(), POLICY, upstream="", providers=path) as p,
        ):
            yield p, far

    return start


async def asked(proxy: Proxy, model: str, **fields: Any) -> tuple[int, dict[str, str], str]:
    status, headers, body = await proxy.post({"model": model, "messages": MESSAGES, **fields})
    return status, headers, body.decode()


async def streamed(proxy: Proxy, model: str, **fields: Any) -> list[dict[str, Any]]:
    """Frames of a stream but its mark of the end, which must be there where no error of ours is."""
    status, _, body = await asked(proxy, model, stream=True, **fields)
    assert status == 200, body
    events = [one.removeprefix("data: ") for one in body.strip().split("\n\n")]
    assert events[-1] == "[DONE]" or "upstream_unavailable" in events[-1]
    return [json.loads(one) for one in events if one != "[DONE]"]


def said(frames: list[dict[str, Any]], index: int = 0) -> str:
    deltas = [choice["delta"] for one in frames for choice in one.get("choices", ()) if choice["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def endings(frames: list[dict[str, Any]]) -> list[tuple[int, str]]:
    choices = [choice for one in frames for choice in one.get("choices", ())]
    return sorted((one["index"], one["finish_reason"]) for one in choices if one["finish_reason"])


@pytest.mark.parametrize("provider", OPENAIS)
async def test_every_choice_of_a_stream_ends_as_the_provider_said(start: Any, provider: str) -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    rest = {"index": 0, "function": {"arguments": "{}"}}
    async with start() as (proxy, far):
        far.frames = [chunk(i, {"content": word}) for word in ("a ", "b ") for i in (0, 1)]
        far.frames += [chunk(0, {"content": ""}, "stop"), chunk(1, {"content": "z"}, "length"), b"data: [DONE]\n\n"]
        if provider == "mistral":
            status, _, body = await asked(proxy, provider, stream=True, n=2)
            assert (status, json.loads(body)["error"]["param"]) == (400, "n")
            return
        frames = await streamed(proxy, provider, n=2)
        assert (said(frames), said(frames, 1)) == ("a b ", "a b z")
        assert endings(frames) == [(0, "stop"), (1, "length")]
        far.frames = [chunk(i, {"tool_calls": [one]}) for one in (call, rest) for i in (0, 1)]
        far.frames += [chunk(i, {}, "tool_calls") for i in (0, 1)] + [b"data: [DONE]\n\n"]
        frames = await streamed(proxy, provider, n=2)
        assert endings(frames) == [(0, "tool_calls"), (1, "tool_calls")]
        client = openai.AsyncOpenAI(base_url=proxy.url + "/v1", api_key="x", max_retries=0)
        async with client.chat.completions.stream(model=provider, messages=MESSAGES, n=2) as events:
            whole = await events.get_final_completion()
        calls = [choice.message.tool_calls for choice in whole.choices]
        assert [(one[0].function.name, one[0].function.arguments) for one in calls if one] == [("f", "{}")] * 2


def interleaved(provider: str, as_chat: bool) -> list[bytes]:
    """Two choices, word by word in turn."""
    words = [(i, word) for word in ("a ", "b ", "c") for i in (0, 1)]
    ends = [(0, "stop"), (1, "length")]
    if provider == "gemini":
        told = [{"index": i, "content": {"parts": [{"text": f"{i}{word}"}], "role": "model"}} for i, word in words]
        told += [{"index": i, "finishReason": {"stop": "STOP"}.get(end, "MAX_TOKENS")} for i, end in ends]
        return [event({"candidates": [one]}) for one in told]
    if as_chat:
        frames = [chunk(i, {"content": f"{i}{word}"}) for i, word in words] + [chunk(i, {}, end) for i, end in ends]
    else:
        pieces = [{"index": i, "text": f"{i}{word}", "finish_reason": None} for i, word in words]
        pieces += [{"index": i, "text": "", "finish_reason": end} for i, end in ends]
        frames = [event({"id": "c", "object": "text_completion", "choices": [one]}) for one in pieces]
    return [*frames, b"data: [DONE]\n\n"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_choice_keeps_its_number_or_several_are_refused(start: Any, path: str) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    async with start() as (proxy, far):
        for provider in {**MODELS, **MORE}:
            keeps = provider in NUMBERED[path]
            far.frames = interleaved(provider, path == CHAT or keeps)
            body = {"model": provider, **prompt, "n": 2, "stream": True}
            status, _, raw = await proxy.post(body, path=path)
            if not keeps:
                assert (status, json.loads(raw)["error"]["param"]) == (400, "n"), provider
                # Nor are choices that nobody asked for mixed into one.
                status, _, raw = await proxy.post({**body, "n": 1}, path=path)
                assert b"upstream_unavailable" in raw, provider
                continue
            frames = [json.loads(one[6:]) for one in raw.decode().strip().split("\n\n") if one != "data: [DONE]"]
            choices = [choice for one in frames for choice in one["choices"]]
            for i in (0, 1):
                mine = [one for one in choices if one["index"] == i]
                texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in mine]
                assert "".join(texts) == f"{i}a {i}b {i}c", provider
            assert endings(frames) == [(0, "stop"), (1, "length")], provider


@pytest.mark.parametrize("provider", MODELS)
async def test_a_stream_is_whole_or_ends_with_an_error(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        far.frames = stream(provider, "a ", "b")
        frames = await streamed(proxy, provider, stream_options={"include_usage": True})
        assert (said(frames), endings(frames)) == ("a b", [(0, "stop")])
        # Nobody told it, and nobody made it up.
        assert [one for one in frames if one.get("usage")] == []
        far.frames = stream(provider, "a ", ends=False)
        frames = await streamed(proxy, provider)
        assert (said(frames), endings(frames)) == ("a ", [])
        assert frames[-1]["error"]["message"] == "the model server's answer broke off"
        entries = await proxy.entries(2)
    assert [one["outcome"] for one in entries] == ["completed", "upstream_broken"]
    assert [(one["tokens"]["prompt"], one["tokens"]["completion"]) for one in entries] == [(None, None)] * 2


@pytest.mark.parametrize("provider", MODELS)
async def test_a_stream_is_charged_by_what_the_provider_tells_or_by_its_text(start: Any, provider: str) -> None:
    # Two letters or spaces have a token at most; so does the prompt, with 8 for its message.
    text, prompt = "word " * 200, 9
    async with start() as (proxy, far):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            far.frames = stream(provider, *[text] * 5, usage=(7, 3000))
            frames = await streamed(proxy, provider, **options)
            told = [one["usage"]["completion_tokens"] for one in frames if one.get("usage")]
            assert (told, said(frames)) == ([3000] if options else [], text * 5)
        for far.frames in (stream(provider, *[text] * 5), stream(provider, *[text] * 5, ends=False)):
            await streamed(proxy, provider)
        far.frames, far.body = [], whole(provider, text * 5, ENDS.get(provider, "stop"))
        status, _, body = await asked(proxy, provider)
        assert (status, "usage" in json.loads(body)) == (200, False)
        entries = await proxy.entries(5)
    tokens = [(one["tokens"]["prompt"], one["tokens"]["completion"], one["tokens"]["charged"]) for one in entries]
    assert tokens == [(7, 3000, 3007)] * 2 + [(None, None, 2500 + prompt)] * 3


WORDS = {"stop": "stop", "length": "length", "content_filter": "content_filter", "abort": "abort", "error": "error"}
WORDS["insufficient_system_resource"] = "insufficient_system_resource"
ENDINGS = {
    "anthropic": {
        **{"end_turn": "stop", "max_tokens": "length", "refusal": "content_filter", "pause_turn": "pause_turn"},
        "model_context_window_exceeded": "length",
    },
    "gemini": {
        **{"STOP": "stop", "MAX_TOKENS": "length", "SAFETY": "content_filter", "RECITATION": "content_filter"},
        **{"PROHIBITED_CONTENT": "content_filter", "OTHER": "OTHER", "A_NEW_ONE": "A_NEW_ONE"},
        "MALFORMED_FUNCTION_CALL": "MALFORMED_FUNCTION_CALL",
    },
    "ollama_chat": {"stop": "stop", "length": "length", "unload": "unload"},
}


@pytest.mark.parametrize("provider", MODELS)
async def test_an_ending_is_what_the_provider_called_it(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        for word, meant in ENDINGS.get(provider, WORDS).items():
            far.frames, far.body = stream(provider, "a ", "b", finish=word), whole(provider, "a b", word)
            frames = await streamed(proxy, provider)
            assert (said(frames), endings(frames)) == ("a b", [(0, meant)]), word
            far.frames = []
            status, _, body = await asked(proxy, provider)
            choice = json.loads(body)["choices"][0]
            assert (status, choice["finish_reason"]) == (200, meant), word
            # Of what Gemini filters litellm leaves out the rest.
            assert choice["message"].get("content", "a b") == "a b"


@pytest.mark.parametrize("provider", MODELS)
async def test_what_did_not_end_or_is_no_stream_never_becomes_a_whole_answer(start: Any, provider: str) -> None:
    word = ENDS.get(provider, "stop")
    one, *others = stream(provider, "a ", "b", finish=word)
    odd = {"without an ending": stream(provider, "a ", "b", finish="")}
    odd["no JSON"] = [one, b'data: {"choices": [\n\n', *others]
    odd["a page"] = [one, b"<html>\n", *others]
    if provider != "ollama_chat":
        # Of Ollama a line of a stream has the form of a whole answer.
        odd["a whole answer"] = [json.dumps(whole(provider, "a b", word)).encode()]
        odd["one on many lines"] = [json.dumps(whole(provider, "a b", word), indent=1).encode()]
    async with start() as (proxy, far):
        for name, far.frames in odd.items():
            status, _, body = await asked(proxy, provider, stream=True)
            assert "upstream_unavailable" in body, name
            assert "[DONE]" not in body, name
            assert 'finish_reason":"' not in body, name
        far.frames, far.body = [], whole(provider, "a b", None)
        status, _, body = await asked(proxy, provider)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")


async def test_a_stream_of_completions_ends_as_one_of_chats(start: Any) -> None:
    def piece(provider: str, text: str, finish: str | None = None) -> bytes:
        said = {"text": text} if provider == "hosted_vllm" else {"delta": {"content": text}}
        return event({"id": "c", "choices": [{"index": 0, **said, "finish_reason": finish}]})

    done = b"data: [DONE]\n\n"
    async with start() as (proxy, far):
        for provider in ("hosted_vllm", "openai"):
            body = {"model": provider, "prompt": "hi", "stream": True}
            for word in ("length", "abort"):
                far.frames = [piece(provider, "a "), piece(provider, "", word), done]
                _, _, raw = await proxy.post(body, path=COMPLETIONS)
                frames = [json.loads(one[6:]) for one in raw.decode().strip().split("\n\n")[:-1]]
                assert "".join(one["choices"][0]["text"] for one in frames) == "a "
                assert endings(frames) == [(0, word)]
            whole_ = event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}).removeprefix(b"data: ")
            for far.frames in ([piece(provider, "a ")], [piece(provider, "a "), done], [whole_]):
                _, _, raw = await proxy.post(body, path=COMPLETIONS)
                assert b"upstream_unavailable" in raw, (provider, far.frames)
                assert b'"stop"' not in raw, (provider, far.frames)
            far.paths.clear()
            status, _, raw = await proxy.post({**body, "logprobs": 2}, path=COMPLETIONS)
            assert (status, json.loads(raw)["error"]["param"], far.paths) == (400, "logprobs", [])


@pytest.mark.parametrize("provider", [*MODELS, *(name for name in MORE if name != "ollama")])
async def test_a_whole_answer_is_read_whatever_is_not_told_beside_it(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        far.body = whole(provider, "a b", ENDS.get(provider, "stop"))
        far.body.pop("usage", None)
        status, _, body = await asked(proxy, provider)
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == "a b"
        assert "usage" not in json.loads(body)


@pytest.mark.parametrize("provider", OPENAIS)
async def test_our_key_leaves_in_no_text_that_others_come_between(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        calls = [{"index": i, "id": f"c{i}", "function": {"name": f"f{i}s", "arguments": ""}} for i in (0, 1)]
        far.frames = [chunk(0, {"tool_calls": [one]}) for one in calls]
        for letter in f"{KEY}, s":
            for delta in ({"content": letter}, {"reasoning_content": letter}):
                far.frames.append(chunk(0, delta))
            for i in (0, 1):
                far.frames.append(chunk(0, {"tool_calls": [{"index": i, "function": {"arguments": letter}}]}))
        far.frames += [chunk(0, {}, "tool_calls"), b"data: [DONE]\n\n"]
        frames = await streamed(proxy, provider)
        deltas = [choice["delta"] for one in frames for choice in one["choices"]]
        for name in ("content", "reasoning_content"):
            assert "".join(delta.get(name) or "" for delta in deltas) == "[key], s"
        told = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        for i in (0, 1):
            functions = [call["function"] for call in told if call["index"] == i]
            assert "".join(one.get("arguments") or "" for one in functions) == "[key], s"
            # A name is not put together from many frames by all clients.
            assert functions[0]["name"] == f"f{i}s"
        # Whatever the text is, no more than the beginning of a key waits.
        far.frames = [chunk(0, {"content": "s"}) for _ in range(3000)] + stream(provider, "!")
        assert said(await streamed(proxy, provider)) == "s" * 3000 + "!"


@pytest.mark.parametrize("provider", MODELS)
async def test_an_error_in_mid_stream_keeps_its_words_and_kind(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        far.frames = stream(provider, "a ", ends=False, error=f"the disk of {KEY} is full")
        frames = await streamed(proxy, provider)
    assert said(frames) == "a "
    error = frames[-1]["error"]
    assert error["message"] == "the disk of [key] is full"
    kinds = {"ollama_chat": ("server_error", None), "anthropic": ("overloaded_error", None)}
    kinds["gemini"] = ("overloaded_error", 503)
    assert (error["type"], error["code"]) == kinds.get(provider, ("overloaded_error", "busy"))


@pytest.mark.parametrize("provider", MODELS)
async def test_our_key_leaves_in_nothing_that_a_provider_says(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        pieces = ("it is sk-", "super", "secretkey12345678", "90, yes", " sk", " yes s")
        far.frames = stream(provider, *pieces)
        assert said(await streamed(proxy, provider)) == "it is [key], yes sk yes s"
        far.frames = stream(provider, *KEY, "!")
        assert said(await streamed(proxy, provider)) == "[key]!"
        far.frames, far.status = [], 400
        far.body = {"error": {"message": f"bad key {KEY}", "type": KEY, "code": KEY}}
        for fields in ({}, {"stream": True}):
            status, _, body = await asked(proxy, provider, **fields)
            assert (status, json.loads(body)["error"]["message"]) == (400, "bad key [key]")
            assert KEY not in body


async def test_a_key_in_a_whole_answer_leaves_neither_as_text_nor_as_log_probabilities(start: Any) -> None:
    tokens = [{"token": "sk-super", "logprob": 0, "bytes": None, "top_logprobs": []}]
    message = {"role": "assistant", "content": f"it is {KEY}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": tokens}}
    async with start() as (proxy, far):
        far.body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        status, _, body = await asked(proxy, "openai", logprobs=True)
        assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "it is [key]")
        assert "sk-super" not in body
        # And zeros that stand for a usage that nobody told are none.
        assert "usage" not in json.loads(body)
        far.body["usage"] = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert json.loads((await asked(proxy, "openai"))[2])["usage"]["total_tokens"] == 8
        entries = await proxy.entries(2)
    tokens = [one["tokens"] for one in entries]
    assert [(one["prompt"], one["completion"]) for one in tokens] == [(None, None), (3, 5)]
    assert tokens[0]["charged"] > 8


@pytest.mark.parametrize("provider", MODELS)
async def test_a_busy_provider_is_told_with_when_to_come_back(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        far.headers = {"retry-after": "7"}
        for status in (429, 500, 503):
            far.status, far.body = status, {"error": {"message": "slow down"}}
            for fields in ({}, {"stream": True}):
                got, headers, body = await asked(proxy, provider, **fields)
                assert (got, headers["retry-after"]) == (status, "7")
                assert json.loads(body)["error"]["message"] == "slow down"


async def test_a_stream_that_litellm_asks_for_late_has_a_status_too(start: Any) -> None:
    async with start() as (proxy, far):
        far.status, far.body = 429, {"error": {"message": "slow down"}}
        body = {"model": "hosted_vllm", "prompt": "hi", "stream": True}
        status, _, raw = await proxy.post(body, path=COMPLETIONS)
        assert (status, json.loads(raw)["error"]["message"]) == (429, "slow down")
        far.frames = [event({"error": {"message": "boom", "type": "t", "code": 7}}), b"data: [DONE]\n\n"]
        _, _, raw = await proxy.post(body, path=COMPLETIONS)
        assert b'"message":"boom"' in raw.replace(b": ", b":")
        far.paths.clear()
        status, _, raw = await proxy.post({**body, "stop": list("abcdefghi")}, path=COMPLETIONS)
        assert (status, json.loads(raw)["error"]["param"], far.paths) == (400, "stop", [])


@pytest.mark.parametrize("provider", MODELS)
async def test_an_answer_that_is_none_is_a_502_in_our_words(start: Any, provider: str) -> None:
    odd: list[Any] = [{}, [], {"choices": []}, {"choices": None}, {"content": None}, b"<html>", b"", b"null", b'"x"']
    async with start() as (proxy, far):
        for far.body in odd:
            status, _, body = await asked(proxy, provider)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (502, "upstream_unavailable"), far.body
            assert error["message"] == "the provider's answer cannot be read"


@pytest.mark.parametrize("provider", ["openai", "anthropic", "gemini"])
async def test_a_provider_that_is_down_is_a_502_without_an_address(start: Any, provider: str) -> None:
    async with start() as (proxy, _):
        for fields in ({}, {"stream": True}):
            status, _, body = await asked(proxy, f"{provider}-down", **fields)
            assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")
            assert "127.0.0.1" not in body


@pytest.mark.parametrize("provider", MODELS)
async def test_nothing_follows_a_redirect(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        for far.status in (301, 303, 307, 308):
            far.headers = {"location": far.url + ELSEWHERE}
            for fields in ({}, {"stream": True}):
                status, _, body = await asked(proxy, provider, **fields)
                assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_unavailable")
        assert len(far.paths) == 8
        assert ELSEWHERE not in far.paths


def branching(depth: int) -> dict[str, Any]:
    """A schema of ``depth`` definitions, of which each has the next one twice."""
    defs: dict[str, Any] = {f"d{depth}": {"type": "string"}}
    for i in range(depth):
        next_ = {"$ref": f"#/$defs/d{i + 1}"}
        defs[f"d{i}"] = {"type": "object", "properties": {"a": next_, "b": next_}}
    return {"$defs": defs, "type": "object", "properties": {"r": {"$ref": "#/$defs/d0"}}}


def long(times: int) -> dict[str, Any]:
    properties = {f"p{i}": {"$ref": "#/definitions/d"} for i in range(times)}
    return {"definitions": {"d": {"type": "string", "description": "x" * 100_000}}, "properties": properties}


RECURSIVE = {"$defs": {"d": {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}}}, "$ref": "#/$defs/d"}
CHAIN = {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)}, "$ref": "#/$defs/d0"}


def with_schema(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    function = {"name": "f", "parameters": schema}
    return {
        "tools": {"tools": [{"type": "function", "function": function}]},
        "functions": {"functions": [function]},
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        },
    }


@pytest.mark.parametrize("provider", ["gemini", "anthropic", "openai"])
async def test_a_schema_that_stands_for_far_more_than_it_is_goes_nowhere(start: Any, provider: str) -> None:
    async with start() as (proxy, far):
        for schema in (branching(30), branching(300), long(40), CHAIN):
            for param, fields in with_schema(schema).items():
                status, _, body = await asked(proxy, provider, **fields)
                assert (status, json.loads(body)["error"]["param"]) == (400, param)
        status, _, body = await asked(proxy, provider, **with_schema(RECURSIVE)["tools"])
        assert status == (502 if provider == "openai" else 400)
        assert len(far.paths) == (provider == "openai")
        far.body = b"<html>"
        assert (await asked(proxy, provider, **with_schema(branching(8))["tools"]))[0] == 502
        assert len(far.paths) == 1 + (provider == "openai")
