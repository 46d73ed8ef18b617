"""Every API that the guard serves: guarded alike, in its own shapes, through the official client and as bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import ValidationError

from detectors import registry
from guard.policy.judged_paths import ANSWERS, EMBEDDINGS, JUDGED, RERANK
from guard.proxy.body import parse_request
from guard.proxy.errors import InvalidRequestError
from guard.proxy.services import FORMS, GUARDED
from guard.proxy.wire import Form
from guard.settings import SettingsError
from tests.proxy.conftest import BLOCKED, BODY, FLAGGED, POLICY, STEERED, Proxy, StartProxy, write_probe
from tests.proxy.detectors import Share, register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_streaming import policy

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (form.route for form in FORMS)
TEXT = [{"role": "user", "content": "private words"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": TEXT},
    COMPLETIONS: {"model": "tiny", "prompt": "private words"},
    RESPONSES: {"model": "tiny", "input": "private words"},
    MESSAGES: {"model": "tiny", "messages": TEXT, "max_tokens": 9},
}
every = pytest.mark.parametrize("route", BODIES)
templated = pytest.mark.parametrize("route", [route for route in BODIES if route != COMPLETIONS])
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
REFUSING = POLICY.replace("action: block", "action: block\n    respond: refusal\n    message: Not this.")
WORDS_TOO = """\
  - {name: leak, when: {detector: text, at_least: 0.5}, action: block, respond: refusal, message: Not this.}
"""
"""A rule on the prompt's text."""


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def client(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused", max_retries=0)


def frame(value: dict[str, Any], name: str | None = None) -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "tiny", "parallel_tool_calls": True,
    "tool_choice": "auto", "tools": [], "output": [], "status": "in_progress",
    "text": {"format": {"type": "text"}},
}  # fmt: skip
USED = {
    "input_tokens": 7, "output_tokens": 5, "total_tokens": 12, "input_tokens_details": {"cached_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip


def streams(route: str, words: tuple[str, ...]) -> list[bytes]:
    """What vLLM sends for an answer of these words."""
    text = "".join(words)
    if route == CHAT:
        parts = [{"index": 0, "delta": {"content": word}, "finish_reason": None} for word in words]
        parts.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        return [*(frame({"id": "c", "object": "chat.completion.chunk", "choices": [one]}) for one in parts), END]
    if route == COMPLETIONS:
        parts = [{"index": 0, "text": word, "logprobs": None, "finish_reason": None} for word in words]
        return [*(frame({"id": "c", "object": "text_completion", "choices": [one]}) for one in parts), END]
    if route == MESSAGES:
        message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "tiny"}
        message |= {"stop_reason": None, "usage": {"input_tokens": 7, "output_tokens": 0}}
        values: list[dict[str, Any]] = [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in words),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": USED},
            {"type": "message_stop"},
        ]
        return [frame(one, one["type"]) for one in values]
    at = {"item_id": "m", "output_index": 0, "content_index": 0}
    done = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [done]}
    values = [
        {"type": "response.created", "response": RESPONSE},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        *({"type": "response.output_text.delta", **at, "delta": word, "logprobs": []} for word in words),
        {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": done},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.completed",
            "response": {**RESPONSE, "status": "completed", "output": [item], "usage": USED},
        },
    ]
    return [frame({**one, "sequence_number": i}, one["type"]) for i, one in enumerate(values)]


END = b"data: [DONE]\n\n"


def whole(route: str, text: str) -> bytes:
    if route == RESPONSES:
        last = streams(route, (text,))[-1].split(b"data: ")[1]
        return json.dumps(json.loads(last)["response"], separators=(",", ":")).encode()
    value: dict[str, Any] = {"id": "x", "usage": {"prompt_tokens": 7, "total_tokens": 12, "completion_tokens": 5}}
    if route == MESSAGES:
        value |= {"type": "message", "content": [{"type": "text", "text": text}], "usage": USED}
    elif route == COMPLETIONS:
        value |= {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    else:
        value |= {"choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]}
    return json.dumps(value, separators=(",", ":")).encode()


def body_of(route: str, stream: bool) -> dict[str, Any]:
    return {**BODIES[route], **({"stream": True} if stream else {})}


@every
@both
async def test_an_allowed_answer_is_the_engines_and_every_field_goes_there(
    start_proxy: StartProxy, route: str, stream: bool
) -> None:
    words = ("fine", " words", " here")
    engine = FakeEngine(frames=streams(route, words), body=whole(route, "".join(words)))
    more = {"unknown": [1], "max_completion_tokens": 5, "tools": [{"type": "function"}], "n": 2, "logprobs": True}
    # Patient: on a busy machine scores that come would be late, and then the answer is flagged.
    for text in (POLICY, policy("window").replace("prompt_timeout_s: 0.3", "prompt_timeout_s: 30")):
        async with running(engine), start_proxy(engine, text) as proxy:
            status, headers, raw = await proxy.post({**body_of(route, stream), **more}, path=route)
            # Nothing of a raw prompt is read; of the two policies one flags that.
            flagged = route == COMPLETIONS and text == POLICY
            assert (status, headers["x-guard-action"]) == (200, "flag" if flagged else "allow")
            assert raw == (b"".join(engine.frames or ()) if stream else engine.body)
            sent = engine.bodies[-1]
            assert ("mia" in sent.pop("vllm_xargs", {})) == (route != COMPLETIONS)
            assert sent == {**body_of(route, stream), **more}
            assert engine.paths[-1] == route
            entry = (await proxy.entries(1))[-1]
            assert (entry["route"], entry["streamed"], entry["outcome"]) == (route, stream, "completed")
            if not stream or route in (RESPONSES, MESSAGES):
                assert entry["tokens"] == {"prompt": 7, "completion": 5, "charged": 12}
            proxy.ledger.write_text("")


@templated
@both
async def test_a_block_is_a_400_with_one_error_shape(start_proxy: StartProxy, route: str, stream: bool) -> None:
    async with running(FakeEngine(logit=BLOCKED, answer_delay_s=None)) as engine, start_proxy(engine) as proxy:
        status, headers, raw = await proxy.post(body_of(route, stream), path=route)
        error = json.loads(raw)
        assert (status, error["error"]["code"], headers["x-should-retry"]) == (400, "content_filter", "false")
        assert error.get("type") == ("error" if route == MESSAGES else None)
        assert b"private words" not in raw


@every
@both
async def test_a_refusal_has_the_apis_own_shape(start_proxy: StartProxy, route: str, stream: bool) -> None:
    text = (REFUSING + WORDS_TOO).replace("detectors:", "detectors:\n  text: {kind: words}")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, text) as proxy:
        if route == CHAT:
            return  # test_policies has it
        if route == MESSAGES:
            status, _, raw = await proxy.post(body_of(route, stream), path=route)
            assert status == 200
            assert b'"stop_reason":"refusal"' in raw
            assert b"Not this." in raw
            assert raw.startswith(b"event: message_start") == stream
            return
        if route == COMPLETIONS:
            asked = {**body_of(route, stream), "prompt": "the secret"}
            made: Any = await client(proxy).completions.create(**asked, n=2)
            answers = [one async for one in made] if stream else [made]
            assert "".join(c.text for one in answers for c in one.choices) == "Not this." * 2
            assert {c.finish_reason for one in answers for c in one.choices} >= {"content_filter"}
            return
        made = await client(proxy).responses.create(**body_of(route, stream))
        answer = [one async for one in made][-1].response if stream else made
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "content_filter")
        assert answer.output_text == "Not this."


LEAK = ("The", " code", " is", " sec", "ret", " ok", " and", " more", ".")


@every
async def test_window_cuts_a_stream_in_the_apis_own_way(start_proxy: StartProxy, route: str) -> None:
    engine = FakeEngine(frames=streams(route, LEAK), word_delay_s=0.01)
    async with running(engine), start_proxy(engine, policy("window")) as proxy:
        status, _, raw = await proxy.post(body_of(route, True), path=route)
        assert status == 200
        assert b"The" in raw
        for trace in (b"sec", b"ret", b" ok", b"response.completed", b"end_turn", b'"stop"'):
            assert trace not in raw
        if route == RESPONSES:
            events = [event async for event in await client(proxy).responses.create(**body_of(route, True))]
            assert events[-1].type == "response.incomplete"
            assert (events[-1].response.id, events[-1].response.incomplete_details.reason) == (
                "resp_1",
                "content_filter",
            )
            numbers = [event.sequence_number for event in events]
            assert numbers == list(range(len(numbers)))
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert said.startswith("The")
            assert events[-1].response.output_text == said
            assert events[-1].response.output[0].status == "incomplete"
            ends = [f"response.{name}.done" for name in ("output_text", "content_part", "output_item")]
            assert [event.type for event in events[-4:-1]] == ends
            assert events[-4].text == events[-3].part.text == events[-2].item.content[0].text == said
        elif route == MESSAGES:
            names = [line.removeprefix("event: ") for line in raw.decode().splitlines() if line.startswith("event: ")]
            assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
            assert b'"stop_reason":"refusal"' in raw
        else:
            assert b'"finish_reason":"content_filter"' in raw
            assert raw.endswith(END)


def of_response(values: list[dict[str, Any]]) -> list[bytes]:
    """A stream of these events, with what opens and ends a response around them."""
    begun, ended = streams(RESPONSES, ("x",))[0], {"type": "response.completed", "response": RESPONSE}
    return [begun, *(frame({**one, "sequence_number": i}, one["type"]) for i, one in enumerate([*values, ended], 1))]


def part_events(words: tuple[str, ...], index: int, kind: str, part_kind: str, *, ends: bool) -> list[dict[str, Any]]:
    at = {"item_id": "x", "output_index": index, "content_index": 0}
    part = {"type": kind, "text": "".join(words)}
    said = [{"type": f"response.{kind}.delta", **at, "delta": word} for word in words]
    done = [
        {"type": f"response.{kind}.done", **at, "text": part["text"]},
        {"type": f"response.{part_kind}.done", **at, "part": part},
    ]
    return said + (done if ends else [])


async def test_a_response_that_is_cut_has_the_items_that_were_said_and_no_half_of_a_call(
    start_proxy: StartProxy,
) -> None:
    thought = {"id": "r", "type": "reasoning", "summary": [], "content": []}
    call = {"id": "f", "type": "function_call", "call_id": "1", "name": "f", "arguments": "", "status": "in_progress"}
    thinking = [
        {"type": "response.output_item.added", "output_index": 0, "item": thought},
        *part_events(("so", " it", " is"), 0, "reasoning_text", "reasoning_part", ends=True),
    ]
    whole_thought = {**thought, "content": [{"type": "reasoning_text", "text": "so it is"}]}
    calling = [
        {"type": "response.output_item.done", "output_index": 0, "item": whole_thought},
        {"type": "response.output_item.added", "output_index": 1, "item": call},
        *({"type": "response.function_call_arguments.delta", "output_index": 1, "item_id": "f", "delta": word}
          for word in ("{", '"a": ', '"b", ', '"c": ', '"secret', '"}', " ", " ")),
    ]  # fmt: skip
    leak = part_events(
        ("a", " b", " c", " d", " secret", " e", " f"), 0, "reasoning_text", "reasoning_part", ends=False
    )
    async with running(FakeEngine(word_delay_s=0.01)) as engine, start_proxy(engine, policy("window")) as proxy:
        engine.frames = of_response(thinking + calling)
        events = [event async for event in await client(proxy).responses.create(**body_of(RESPONSES, True))]
        assert [one.type for one in events[-1].response.output] == ["reasoning"]
        assert "function_call_arguments.done" not in "".join(event.type for event in events)
        assert any(event.type == "response.function_call_arguments.delta" for event in events)
        engine.frames = of_response(thinking[:1] + leak)
        events = [event async for event in await client(proxy).responses.create(**body_of(RESPONSES, True))]
        said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert said.startswith("a")
        (item,) = events[-1].response.output
        assert (item.content[0].text, item.status) == (said, "incomplete")
        ends = [f"response.{name}.done" for name in ("reasoning_text", "reasoning_part", "output_item")]
        assert [event.type for event in events[-4:]] == [*ends, "response.incomplete"]


@every
async def test_hold_blocks_and_redacts_whatever_the_shape(start_proxy: StartProxy, route: str) -> None:
    engine = FakeEngine(frames=streams(route, LEAK), body=whole(route, "".join(LEAK)))
    async with running(engine), start_proxy(engine, policy("hold")) as proxy:
        for stream in (False, True):
            status, _, raw = await proxy.post(body_of(route, stream), path=route)
            assert (status, json.loads(raw)["error"]["code"]) == (400, "content_filter")
    text = policy("hold", action="redact", more="    redact: {replacement: '[X]'}\n")
    async with running(engine), start_proxy(engine, text) as proxy:
        for stream in (False, True):
            status, _, raw = await proxy.post(body_of(route, stream), path=route)
            assert status == 200
            assert b"[X]" in raw
            assert b"sec" not in raw
            assert b"ret" not in raw
        if route == RESPONSES:
            answer = await client(proxy).responses.create(**body_of(route, False))
            assert answer.output_text == "The code is [X] ok and more."
            events = [event async for event in await client(proxy).responses.create(**body_of(route, True))]
            assert events[-1].response.output_text == "The code is [X] ok and more."


@templated
async def test_steering_works_in_every_api(start_proxy: StartProxy, route: str) -> None:
    async with running(FakeEngine(logit=STEERED)) as engine, start_proxy(engine) as proxy:
        assert (await proxy.post(body_of(route, False), path=route))[1]["x-guard-action"] == "steer"
        assert engine.specs[1] is not None
        assert set(engine.specs[1]) == {"steer"}


RAW = {
    "a chat written out": "<|im_start|>user\nprivate words<|im_end|>\n<|im_start|>assistant\n",
    "the same without its last line's end": "<|im_start|>user\nprivate words<|im_end|>\n<|im_start|>assistant",
    "the same with the beginning of an answer": "<|im_start|>user\nprivate words<|im_end|>\n<|im_start|>assistant\nOk",
    "bare words": "private words",
    "tokens": [5, 6, 7],
    "tokens in a list": [[5, 6, 7]],
}


@both
@pytest.mark.parametrize("scope", ["", ", scope: system"])
async def test_where_a_raw_prompt_is_read_is_not_the_clients_to_choose(
    start_proxy: StartProxy, stream: bool, scope: str
) -> None:
    """However it ends, what the model makes of its end is no score: never clean, and never out of scope."""
    flagging = POLICY.replace("kind: probe", f"kind: probe{scope}")
    blocking = flagging.replace("on_error: flag", "on_error: block")
    async with running(FakeEngine(logit=-9.0)) as engine, start_proxy(engine, flagging) as proxy:
        for prompt in RAW.values():
            status, headers, _ = await proxy.post({**body_of(COMPLETIONS, stream), "prompt": prompt}, path=COMPLETIONS)
            assert (status, headers["x-guard-action"], headers["x-guard-rules"]) == (200, "flag", "stop")
            assert not any(engine.specs)
        for entry in await proxy.entries(len(RAW)):
            assert entry["scores"] == {"danger": None}
            assert entry["detectors"]["danger"].startswith("unavailable: a raw prompt has no template")
    async with running(FakeEngine(logit=-9.0)) as engine, start_proxy(engine, blocking) as proxy:
        for prompt in RAW.values():
            status, _, raw = await proxy.post({**body_of(COMPLETIONS, stream), "prompt": prompt}, path=COMPLETIONS)
            assert (status, json.loads(raw)["error"]["code"]) == (503, "guard_unavailable")
        assert not engine.bodies


async def test_anthropics_client_reads_refusals_and_streams_that_are_cut(start_proxy: StartProxy) -> None:
    asked: dict[str, Any] = {**BODIES[MESSAGES]}
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, REFUSING) as proxy:
        asking = anthropic.AsyncAnthropic(base_url=proxy.url, api_key="unused", max_retries=0).messages
        refused = await asking.create(**asked)
        async with asking.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for message in (refused, streamed):
            assert [(block.type, getattr(block, "text", "")) for block in message.content] == [("text", "Not this.")]
            assert message.stop_reason == "refusal"
    engine = FakeEngine(frames=streams(MESSAGES, LEAK), word_delay_s=0.01)
    async with running(engine), start_proxy(engine, policy("window")) as proxy:
        asking = anthropic.AsyncAnthropic(base_url=proxy.url, api_key="unused", max_retries=0).messages
        async with asking.stream(**asked) as stream:
            cut = await stream.get_final_message()
        assert cut.stop_reason == "refusal"
        assert "".join(block.text for block in cut.content if block.type == "text") in ("The", "The code")
    async with running(FakeEngine(frames=streams(MESSAGES, LEAK)[:4])) as engine, start_proxy(engine) as proxy:
        asking = anthropic.AsyncAnthropic(base_url=proxy.url, api_key="unused", max_retries=0).messages
        with pytest.raises(anthropic.APIError, match="broke off"):
            async with asking.stream(**asked) as stream:
                await stream.get_final_message()


@every
@pytest.mark.parametrize("contract", ["hold", "window", "observe"])
async def test_every_apis_stream_ends_once_at_an_engines_error(
    start_proxy: StartProxy, route: str, contract: str
) -> None:
    named = route in (MESSAGES, RESPONSES)
    error = frame({"type": "error", "error": {"type": "x", "message": "died"}}, "error" if named else None)
    told = {"message": "the model server ended its answer with an error", "type": "x", "param": None, "code": None}
    engine = FakeEngine(frames=[error, *streams(route, LEAK)])
    async with running(engine), start_proxy(engine, policy(contract)) as proxy:
        raw = (await proxy.post(body_of(route, True), path=route))[2]
        assert raw == frame({"type": "error", "error": told}, "error" if named else None) + (b"" if named else END)
    async with running(engine), start_proxy(engine) as proxy:
        assert (await proxy.post(body_of(route, True), path=route))[2] == error + (b"" if named else END)


async def test_a_stream_of_messages_ends_with_a_named_error_when_it_breaks(start_proxy: StartProxy) -> None:
    engine = FakeEngine(frames=streams(MESSAGES, LEAK)[:4])
    async with running(engine), start_proxy(engine) as proxy:
        raw = (await proxy.post(body_of(MESSAGES, True), path=MESSAGES))[2]
        last = raw.decode().strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.split("data: ")[1])["type"] == "error"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": ["one", "two"]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "prompt"),
        (COMPLETIONS, {"prompt_embeds": "x"}, "prompt_embeds"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": ["x"]}, "input[0]"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        (RESPONSES, {"input": [{"role": "user", "content": "a"}, {"id": "msg_1"}]}, "input[1]"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_label": "a", "server_url": "http://a"}]}, "tools[0].type"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}, {"type": "container"}]}, "tools[1].type"),
        (RESPONSES, {"input": [{"role": "assistant", "content": "a", "status": "in_progress"}]}, "input[0].status"),
        (RESPONSES, {"enable_response_messages": True}, "enable_response_messages"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        (MESSAGES, {"ec_transfer_params": {}}, "ec_transfer_params"),
        (RESPONSES, {"vllm_xargs": {"mia": "{}"}}, "vllm_xargs.mia"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            MESSAGES,
            {"chat_template_kwargs": {"continue_final_message": True}},
            "chat_template_kwargs.continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_guarded_is_refused_at_the_edge(
    proxy: Proxy, route: str, fields: dict[str, Any], param: str
) -> None:
    status, _, raw = await proxy.post({**BODIES[route], **fields}, path=route)
    assert (status, json.loads(raw)["error"]["param"]) == (400, param)
    assert not proxy.engine.bodies


def parsed(route: str, fields: dict[str, Any]) -> Any:
    form: Form = next(form for form in FORMS if form.route == route)
    return parse_request(form, json.dumps({**BODIES[route], **fields}).encode())


def test_messages_are_counted_as_the_engine_counts_them() -> None:
    """Which message a policy means must be the one that the engine reads."""
    items = [
        {"role": "user", "content": "a"}, {"type": "reasoning", "summary": [], "content": [{"text": "b"}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call", "name": "g", "arguments": "{}", "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"role": "assistant", "content": "e"}, {"role": "user", "content": [{"type": "input_text", "text": "f"}]},
    ]  # fmt: skip
    request = parsed(RESPONSES, {"instructions": "i", "input": items})
    assert request.roles == ("system", "user", "assistant", "tool", "assistant", "assistant", "user")
    assert [(message, text) for message, _, text in request.texts] == [
        (0, "i"), (1, "a"), (2, "b"), (2, "{}"), (2, "{}"), (3, "c"), (4, "d"), (5, "e"), (6, "f"),
        # Names of tools are shown too, and ids of calls.
        (2, "f"), (2, "1"), (2, "g"), (2, "2"), (3, "1"),
    ]  # fmt: skip
    request = parsed(MESSAGES, {"system": [{"type": "text", "text": "s"}], "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"x": "b"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "c"}, {"type": "image"}]},
            {"type": "text", "text": "d"},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "e"}]},
    ]})  # fmt: skip
    assert request.roles == ("system", "user", "assistant", "tool", "user", "user", "tool")
    assert [(message, text) for message, _, text in request.texts] == [
        (0, "s"), (1, "a"), (2, '{"x": "b"}'), (3, "c"), (5, "d"), (6, "e"), (2, "1"), (2, "f"), (3, "1"), (6, "1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        *("v1/rerank", CHAT, "/v1/models", "/v1/models/tiny", f"{CHAT}/", f"{CHAT}?x", f"/{CHAT}", "/v1/*", "/v1/a#x"),
        *("/metrics", "/health", "/livez", "/readyz", "/v1/embeddings", "/v1/messages"),
        *("/v1/score/../chat/completions", "/v1/./chat/completions", "/v1//chat/completions", "/v1/chat%2Fcompletions"),
        *("/v1/chat/completions;x", "/v1/chat\\completions", "/v1/score/", "/"),
    ],
)
async def test_a_path_that_is_none_or_is_guarded_is_not_passed(start_proxy: StartProxy, path: str) -> None:
    with pytest.raises((SettingsError, ValidationError), match="passed_paths"):
        async with running(FakeEngine()) as engine, start_proxy(engine, passed_paths=path):
            pass


@pytest.mark.parametrize(
    ("n", "choices"),
    [(None, 1), (3, 3), ("3", 3), (3.0, 3), (0, 1), (-2, 1), (128, 128), ("0000000000128", 128)],
)
def test_choices_are_counted_as_the_engine_counts_them(n: Any, choices: int) -> None:
    request = parsed(CHAT, {"n": n})
    assert request.form.choices(request.fields) == choices


@every
@pytest.mark.parametrize("name", ["n", "best_of"])
@pytest.mark.parametrize(
    "number",
    [129, 1000, "129", "00000000000200", " 200 ", "2_00", "200.0", 200.0, 1e300, "9" * 5000, "x", True, 2.5, []],
)
def test_more_choices_than_can_be_judged_are_refused_however_they_are_written(
    route: str, name: str, number: Any
) -> None:
    """The engine serves far more; each that it answers must be judged, charged and ended."""
    with pytest.raises(InvalidRequestError, match=f"{name} must be a whole number, and at most 128") as refused:
        parsed(route, {name: number})
    assert refused.value.param == name


def test_odd_bodies_are_refused_and_never_a_fault() -> None:
    for form in FORMS:
        for odd in (
            None,
            1,
            "x",
            [],
            [None],
            {},
            [[]],
            [{"role": 1}],
            [{"role": "user", "content": [None, {"text": 1}]}],
            [{"role": "assistant", "content": [{"type": "tool_use"}, {"type": "tool_result"}]}],
            [{"role": "user", "content": [{"type": "tool_result"}, {"type": "tool_use", "input": None}]}],
            [{"role": "assistant", "tool_calls": [None, {}, {"function": 1}, {"function": {"arguments": 1}}]}],
        ):
            for name in ("messages", "prompt", "input", "system", "instructions"):
                body = json.dumps({**BODIES[form.route], name: odd}).encode()
                try:
                    request = parse_request(form, body)
                except InvalidRequestError:
                    continue
                assert len(request.roles) >= 1
                assert all(isinstance(text, str) for _, _, text in request.texts)


EMBED = {"model": "tiny", "input": ["one", "two"]}


async def test_embeddings_are_judged_by_their_text_and_unread_detectors_are_missing(start_proxy: StartProxy) -> None:
    answer = b'{"object":"list","data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}'
    engine = FakeEngine(body=answer)
    text = policy("hold", stage="prompt")
    async with running(engine), start_proxy(engine, text) as proxy:
        status, headers, raw = await proxy.post({**EMBED, "dimensions": 3}, path="/v1/embeddings")
        assert (status, raw, headers["x-guard-action"]) == (200, answer, "allow")
        assert engine.bodies == [{**EMBED, "dimensions": 3}]
        assert (await proxy.post({**EMBED, "input": ["fine", "secret"]}, path="/v1/embeddings"))[0] == 400
        assert (await proxy.post({**EMBED, "input": []}, path="/v1/embeddings"))[0] == 400
        first = (await proxy.entries(3))[0]
        assert first["detectors"]["danger"] == "unavailable: the model is not read while it embeds"
        assert first["tokens"] == {"prompt": 4, "completion": 0, "charged": 4}
    strict = POLICY.replace("on_error: flag", "on_error: block")
    async with running(engine), start_proxy(engine, strict) as proxy:
        assert (await proxy.post(EMBED, path="/v1/embeddings"))[0] == 503
    async with running(engine), start_proxy(engine, POLICY) as proxy:
        made = await proxy.post(EMBED, path="/v1/embeddings")
        assert (made[0], made[1]["x-guard-action"]) == (200, "flag")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_model_that_vllm_does_not_serve_is_a_404_with_its_code(
    start_proxy: StartProxy, path: str, stream: bool
) -> None:
    async with running(FakeEngine(unserved=("tiny",))) as engine, start_proxy(engine) as proxy:
        status, _, raw = await proxy.post({**BODY, "max_tokens": 9, "stream": stream}, path=path)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["type"] == "invalid_request_error"
        entry = await proxy.entry()
    assert (entry["outcome"], entry["error_code"], entry["tokens"]["charged"]) == ("refused", "model_not_found", 0)


TURN = {"role": "user", "content": "one"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [[TURN], [1, 2]]}, "input[1][0]"),
        ({"input": [[TURN], []]}, "input[1]"),
        ({"input": [[TURN], [{"content": "one"}]]}, "input[1][0].role"),
        ({"input": [[1, "two"]]}, "input[0]"),
        ({"input": ["one", []]}, "input[1]"),
        ({"input": [TURN, "two"]}, "input[1]"),
        ({"input": ["one", TURN]}, "input[1]"),
        ({"input": [{"content": "one"}]}, "input[0].role"),
        ({"input": "one", "messages": [TURN]}, "input"),
        ({"messages": [TURN, [TURN]]}, "messages[0]"),
        ({"messages": [[TURN], [{"role": 1}]]}, "messages[1][0].role"),
        ({"messages": [[{**TURN, "content": [{"type": "prompt_embeds"}]}]]}, "messages[0][0].content"),
        ({"messages": [[TURN]] * 2049}, "messages"),
        ({"input": ["a"] * 2049}, "input"),
        ({"messages": [[TURN]] * 2000, "chat_template_kwargs": {"a": "x" * 2001}}, "messages"),
        ({"messages": [[TURN] * 5001, [TURN] * 5000]}, "messages"),
    ],
)
async def test_what_of_embeddings_cannot_be_guarded_is_refused(
    proxy: Proxy, fields: dict[str, Any], param: str
) -> None:
    status, _, raw = await proxy.post({"model": "tiny", **fields}, path="/v1/embeddings")
    assert (status, json.loads(raw)["error"]["param"]) == (400, param)
    assert not proxy.engine.bodies


async def test_a_conversation_to_embed_is_redacted_as_a_chat_is(start_proxy: StartProxy) -> None:
    rules = """\
version: 1
name: test
detectors:
  text: {kind: words, scope: user.last}
rules:
  - name: leak
    when: {detector: text, at_least: 0.5}
    action: redact
    redact: {messages: [user.last], replacement: gone}
"""
    asked = {"model": "tiny", "input": [{"role": "user", "content": "a secret"}, {"role": "user", "content": "secret"}]}
    engine = FakeEngine(body=b'{"object":"list","data":[]}')
    async with running(engine), start_proxy(engine, rules) as proxy:
        status, headers, _ = await proxy.post(asked, path="/v1/embeddings")
        assert (status, headers["x-guard-action"]) == (200, "redact")
        (sent,) = engine.bodies
        assert [one["content"] for one in sent["input"]] == ["a secret", "gone"]
        assert "messages" not in sent


async def test_other_paths_pass_where_the_operator_says_so_and_nowhere_else(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, passed_paths="/version,/v1/rerank") as proxy:
        status, headers, _ = await proxy.post({"x": 1}, path="/v1/rerank")
        assert status == 404
        assert "x-guard-action" not in headers
        assert (await proxy.entry())["outcome"] == "upstream_error"
        status, _, raw = await proxy.post({"x": 1}, path="/v1/score")
        assert (status, json.loads(raw)["error"]["code"]) == (404, "not_found")
        assert (await proxy.post({"x": 1}, {"content-type": "text/plain"}, path="/v1/rerank"))[0] == 415


async def test_an_assignment_may_go_by_route(start_proxy: StartProxy, tmp_path: Any) -> None:
    route, path = RESPONSES, tmp_path / "p"
    path.mkdir()
    (path / "a.yaml").write_text(POLICY)
    (path / "b.yaml").write_text("{version: 1, name: lax}")
    (path / "selection.yaml").write_text(
        f"{{version: 1, default: test, assignments: [{{name: x, policy: lax, match: {{routes: ['{route}']}}}}]}}"
    )
    async with running(FakeEngine(logit=FLAGGED)) as engine, start_proxy(engine, path=path) as proxy:
        for other in BODIES:
            label = (await proxy.post(BODIES[other], path=other))[1]["x-guard-policy"]
            assert label.startswith("lax@" if other == route else "test@")


RERANKED = {"model": "tiny", "query": "q", "documents": ["a secret", "b"]}


def reranking(folder: Path) -> dict[str, Any]:
    """Settings of a proxy that ranks."""
    config = folder / "configs" / "core_reranker" / "tiny.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"model_info": {"name": "tiny"}, "params": {"important_heads": [[0, 0]]}}')
    return {"rerank": True, "model_configs": folder / "configs", "config_key": "tiny"}


@pytest.mark.parametrize("scope", ["", "system", "tool", "user"])
@pytest.mark.parametrize("path", [RERANK[0], EMBEDDINGS])
async def test_no_scope_makes_a_detector_that_reads_the_model_clean_where_nothing_is_read(
    start_proxy: StartProxy, tmp_path: Path, path: str, scope: str
) -> None:
    settings = reranking(tmp_path)
    write_probe(tmp_path / "configs" / "probe")
    use = f"{{kind: probe, scope: {scope}}}" if scope else "{kind: probe}"
    text = POLICY.replace("{kind: probe}", use).replace("on_error: flag", "on_error: block")
    body = {RERANK[0]: {"model": "tiny", "query": "q", "documents": ["a"]}, EMBEDDINGS: EMBED}[path]
    async with running(FakeEngine()) as engine, start_proxy(engine, text, **settings) as proxy:
        assert (await proxy.post(body, path=path))[0] == 503
        assert not engine.bodies


async def test_a_fault_of_the_engine_while_documents_are_ranked_is_an_error_of_the_guards(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    lax = "{version: 1, name: lax}"
    async with running(FakeEngine()) as engine, start_proxy(engine, lax, **reranking(tmp_path)) as proxy:
        engine.error = (500, {"error": {"message": "EngineCore: a secret", "code": 500}}, {})
        with pytest.raises(openai.APIStatusError) as failed:
            async with openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="x", max_retries=0) as client:
                await client.post("/rerank", body=RERANKED, cast_to=object)
        assert failed.value.status_code == 502
        assert failed.value.code == "upstream_unavailable"
        assert "the model server failed (500)" in failed.value.message
        assert "secret" not in failed.value.message
        entry = await proxy.entry()
        assert (entry["outcome"], entry["status"], entry["tokens"]["charged"]) == ("upstream_unavailable", 502, 0)
        engine.error = (400, {"error": {"message": "too long"}, "choices": ["a secret"]}, {})
        status, _, raw = await proxy.post(RERANKED, path="/v1/rerank")
        assert (status, json.loads(raw)) == (400, {"error": {"message": "too long"}})
        # What clients can act on stays.
        engine.error = (503, {"error": {"message": "later"}}, {"retry-after": "7"})
        status, headers, _ = await proxy.post(RERANKED, path="/v1/rerank")
        assert (status, headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize("scope", ["", "tool"])
async def test_clean_texts_do_not_make_up_for_one_document_or_query_that_is_not(
    start_proxy: StartProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "share", lambda _path: Share())
    use = f"{{kind: share, scope: {scope}}}" if scope else "{kind: share}"
    text = f"""version: 1
name: p
detectors: {{text: {use}}}
rules: [{{name: bad, when: {{detector: text, at_least: 0.6}}, action: block}}]
"""
    many = [f"clean {i}" for i in range(20)]
    async with running(FakeEngine()) as engine, start_proxy(engine, text, **reranking(tmp_path)) as proxy:
        for documents in (["bad bad"], ["bad bad", *many], [*many, {"text": "bad bad"}]):
            status, headers, _ = await proxy.post({**RERANKED, "documents": documents}, path=RERANK[0])
            assert (status, headers["x-guard-rules"]) == (400, "bad")
        assert [one["scores"]["text"] >= 0.6 for one in await proxy.entries(3)] == [True] * 3
        status, *_ = await proxy.post({**RERANKED, "query": "bad bad", "documents": many}, path=RERANK[0])
        # A query is no tool's.
        assert (status == 400) == (scope == "")


@pytest.mark.parametrize("replacement", ["gone", "' '"])
async def test_a_rule_that_redacts_documents_is_named_and_they_get_no_order(
    start_proxy: StartProxy, tmp_path: Path, replacement: str
) -> None:
    text = f"""version: 1
name: p
detectors:
  bad: {{kind: words}}
rules:
  - name: bad
    when: {{detector: bad, at_least: 1}}
    action: redact
    redact: {{messages: [tool.all], replacement: {replacement}}}
"""
    async with running(FakeEngine()) as engine, start_proxy(engine, text, **reranking(tmp_path)) as proxy:
        status, _, raw = await proxy.post(RERANKED, path="/v1/rerank")
        assert (status, json.loads(raw)["error"]["code"]) == (502, "redaction_unavailable"), raw
        assert "rule bad" in json.loads(raw)["error"]["message"]
        _, _, raw = await proxy.post({}, path="/v1/nothing")
        assert "/v1/rerank, /rerank, /v2/rerank" in json.loads(raw)["error"]["message"]


def test_the_paths_that_selections_may_name_are_those_that_the_guard_judges() -> None:
    assert tuple(form.route for form in FORMS) == ANSWERS
    assert JUDGED.keys() == {*GUARDED, *RERANK}


async def test_no_answer_says_which_software_gave_it(proxy: Proxy) -> None:
    for _, headers, _ in (await proxy.post(), await proxy.post(path="/nowhere"), await proxy.get("/readyz")):
        assert "server" not in headers
