"""The policies inside LiteLLM's proxy: its hooks called as it calls them, and the real proxy where it is installed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import HTTPException

from detectors import registry
from guard.litellm_guardrail import MiaGuardrail
from guard.machine import free_port
from guard.policy import PolicyError
from tests.proxy.conftest import BLOCKED, write_probe
from tests.proxy.detectors import Share, register
from tests.proxy.engine import FakeEngine, running
from tests.servers import end, wait_ready

litellm = pytest.importorskip("litellm", reason="needs litellm: pip install 'mia-guard[litellm]'")

POLICY = """\
version: 1
name: inside
detectors:
  danger: {kind: probe}
  leak: {kind: words, config: tiny}
rules:
  - {name: stop, when: {detector: danger, at_least: 0.9}, action: block, on_error: flag}
  - name: hide
    when: {detector: leak, at_least: 0.5}
    action: redact
    redact: {messages: user, replacement: "[gone]"}
    on_error: block
  - {name: answer, stage: output, when: {detector: leak, at_least: 0.5}, action: block, message: No leaks.}
"""
IN_MODEL = "version: 1\nname: probing\ndetectors: {danger: {kind: probe}}\nrules:\n" + POLICY.splitlines()[6] + "\n"
COMMAND = os.environ.get("GUARD_TEST_LITELLM")
"""A ``litellm`` command whose environment has litellm[proxy], which is too large for every run of the tests."""

MASTER_KEY = "sk-" + "0123456789abcdef" * 4
Make = Callable[..., MiaGuardrail]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    register(monkeypatch)
    folder = tmp_path / "model_configs"
    write_probe(folder / "probe")
    (folder / "words").mkdir()
    (folder / "words" / "tiny.json").write_text("{}")

    def build(policy: str = POLICY, **options: Any) -> MiaGuardrail:
        (tmp_path / "policy.yaml").write_text(policy)
        options = {"guardrail_name": "mia", "event_hook": ["pre_call", "post_call"], "default_on": True, **options}
        return MiaGuardrail(str(tmp_path / "policy.yaml"), "tiny", str(folder), **options)

    return build


def request(text: str) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "metadata": {}}


async def pre_call(guardrail: MiaGuardrail, data: dict[str, Any], call_type: str) -> dict[str, Any]:
    judged: dict[str, Any] = await guardrail.async_pre_call_hook(
        user_api_key_dict=None, cache=None, data=data, call_type=call_type
    )
    return judged


async def ask(guardrail: MiaGuardrail, text: str, call_type: str = "acompletion") -> dict[str, Any]:
    return await pre_call(guardrail, request(text), call_type)


async def test_what_the_model_computes_decides_before_litellm_asks_anybody(make: Make) -> None:
    async with running(FakeEngine()) as engine:
        guardrail = make(engine=engine.url + "/v1", engine_model="theirs")
        assert (await ask(guardrail, "hello"))["messages"][0]["content"] == "hello"
        assert (engine.bodies[0]["model"], engine.bodies[0]["max_tokens"]) == ("theirs", 1)
        engine.logit = BLOCKED
        with pytest.raises(HTTPException) as blocked:
            await ask(guardrail, "hello")
        assert (blocked.value.status_code, blocked.value.detail["code"]) == (400, "content_filter")


async def test_without_an_engine_its_detectors_are_unavailable_and_texts_are_judged(make: Make) -> None:
    guardrail = make()
    data = await ask(guardrail, "the secret")
    assert data["messages"][0]["content"] == "[gone]"
    assert data["metadata"]["mia_guard"]["rules"] == ["stop", "hide"]
    headers = await guardrail.async_post_call_response_headers_hook(data=data, user_api_key_dict=None, response=None)
    assert (headers["x-guard-action"], headers["x-guard-rules"]) == ("redact", "stop,hide")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("documents", [{"text": "the secret"}]),
        ("chat_template_kwargs", {"note": "the secret"}),
        ("chat_template_kwargs", {"note": 123456789}),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"default": 123456789}}}]),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"description": "the secret"}}}),
    ],
)
async def test_every_field_that_a_template_may_show_is_read(make: Make, field: str, value: Any) -> None:
    data = {**request("hello"), field: value}
    await make().async_pre_call_hook(user_api_key_dict=None, cache=None, data=data, call_type="acompletion")
    assert "hide" in data["metadata"]["mia_guard"]["rules"]


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
SECRET: list[dict[str, Any]] = [{"role": "user", "content": "the secret"}]
UNJUDGED: dict[str, tuple[str, dict[str, Any]]] = {
    "messages twice": ("acompletion", {**HELLO, "extra_body": {"messages": SECRET}}),
    "a prompt twice": ("atext_completion", {"prompt": "a", "extra_body": {"prompt": "the secret"}}),
    "an input twice": ("aresponses", {"input": "a", "extra_body": {"input": "the secret"}}),
    "bodies in bodies": ("acompletion", {**HELLO, "extra_body": {"extra_body": {"messages": SECRET}}}),
    "no object": ("acompletion", {**HELLO, "extra_body": "the secret"}),
    "a template": ("acompletion", {**HELLO, "chat_template": "the secret"}),
    "a template beside": ("acompletion", {**HELLO, "extra_body": {"chat_template": "the secret"}}),
    "an answer to go on with": ("acompletion", {**HELLO, "continue_final_message": True}),
    "what the guard asks": ("acompletion", {**HELLO, "vllm_xargs": {"mia": "{}"}}),
    "what it asks, beside": ("acompletion", {**HELLO, "extra_body": {"vllm_xargs": {"mia": "{}"}}}),
    "embeds": ("atext_completion", {"prompt": "a", "prompt_embeds": "AAAA"}),
    "another conversation": ("aresponses", {"input": "a", "previous_response_id": "resp_1"}),
    "a stored prompt": ("aresponses", {"input": "a", "prompt": {"id": "p", "variables": {"x": "secret"}}}),
    "a managed prompt": ("acompletion", {**HELLO, "prompt_id": "p", "prompt_variables": {"x": "secret"}}),
    "another request": ("acompletion", {**HELLO, "fallbacks": [{"model": "m", "messages": SECRET}]}),
    "another's messages": ("acompletion", {**HELLO, "context_window_fallbacks": [{"m": SECRET}]}),
    "another API's prompt": ("atext_completion", {"prompt": "a", "messages": SECRET}),
    "another API's system": ("acompletion", {**HELLO, "system": "the secret"}),
    "another provider's": ("acompletion", {**HELLO, "system_instruction": "the secret"}),
    "its prompt": ("acompletion", {**HELLO, "extra_body": {"contents": [{"parts": [{"text": "the secret"}]}]}}),
    "anything": ("acompletion", {**HELLO, "unheard_of": ["the secret"]}),
    "too many answers": ("acompletion", {**HELLO, "n": 129}),
    "a kind of call": ("anew", HELLO),
}


@pytest.mark.parametrize("name", list(UNJUDGED))
async def test_what_nobody_can_judge_is_refused_and_not_passed(make: Make, name: str) -> None:
    """Also under a policy that lets pass what cannot be measured."""
    call_type, fields = UNJUDGED[name]
    with pytest.raises(HTTPException) as refused:
        await pre_call(make(), {"model": "tiny", "metadata": {}, **copy.deepcopy(fields)}, call_type)
    assert refused.value.status_code == 400
    assert "rule" not in refused.value.detail["error"].split(":")[0]


async def test_texts_in_the_extra_body_are_judged_and_redacted_there(make: Make) -> None:
    data = {"model": "tiny", "extra_body": {"messages": copy.deepcopy(SECRET), "chat_template_kwargs": {"a": "secret"}}}
    data |= {"metadata": {}, "extra_headers": {"a": "b"}, "user": "a", "fallbacks": ["b", {"a": ["b"]}, {"model": "c"}]}
    await pre_call(make(), data, "acompletion")
    assert data["extra_body"]["messages"][0]["content"] == "[gone]"
    assert data["extra_body"]["chat_template_kwargs"] == {"a": "[gone]"}
    assert "messages" not in data


async def test_fields_that_litellm_adds_and_those_that_an_operator_knows_pass(make: Make) -> None:
    added: dict[str, Any] = {
        "proxy_server_request": {"body": {"messages": SECRET}}, "secret_fields": object(), "litellm_call_id": "a",
        "litellm_logging_obj": object(), "_litellm_strip_stream_usage": True, "success_callback": ["langfuse"],
        "langfuse_public_key": "a", "litellm_trusted_callback_vars": {"langfuse_public_key": "a"}, "tags": ["a"],
        "aws_region_name": "a", "cache": {}, "timeout": 3, "extra_headers": {"a": "b"}, "litellm_session_id": "a",
    }  # fmt: skip
    data = {**request("hello"), **added}
    await pre_call(make(), data, "acompletion")
    assert data["metadata"]["mia_guard"]["rules"] == ["stop"]
    data = {**request("hello"), "unheard_of": "a"}
    await pre_call(make(harmless_fields=["unheard_of"]), data, "acompletion")
    assert data["unheard_of"] == "a"


async def test_the_engine_reads_the_prompt_that_is_judged(make: Make) -> None:
    async with running(FakeEngine()) as engine:
        beside = {"chat_template_kwargs": {"a": "b"}, "reasoning_effort": "high", "stop": ["x"]}
        data = {**request("hello"), "n": 3, "stream": True, "extra_body": beside}
        await pre_call(make(engine=engine.url), data, "acompletion")
        (body,) = engine.bodies
    assert (body["chat_template_kwargs"], body["reasoning_effort"]) == ({"a": "b"}, "high")
    assert not body.keys() & {"n", "stream", "extra_body", "metadata"}


@pytest.mark.parametrize("call_type", ["aresponses", "anthropic_messages"])
async def test_nothing_is_written_where_a_client_s_own_metadata_stands(make: Make, call_type: str) -> None:
    fields: dict[str, Any] = {"input": "a"} if call_type == "aresponses" else {**HELLO}
    data = {"model": "tiny", "metadata": {"a": "b"}, "litellm_metadata": {}, **fields}
    await pre_call(make(), data, call_type)
    assert data["metadata"] == {"a": "b"}
    headers = await make().async_post_call_response_headers_hook(data=data, user_api_key_dict=None, response=None)
    assert headers["x-guard-rules"] == "stop"


SHARE = """\
version: 1
name: share
detectors: {leak: {kind: share, config: tiny}}
rules: [{name: stop, when: {detector: leak, at_least: 0.5}, action: block}]
"""


async def test_each_text_that_is_embedded_is_judged_and_redacted_by_itself(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by the proxy: many clean ones do not make up for one that is not."""
    monkeypatch.setitem(registry.BUILT_IN, "share", lambda _path: Share())
    (tmp_path / "model_configs" / "share").mkdir()
    (tmp_path / "model_configs" / "share" / "tiny.json").write_text("{}")
    clean = ["A long text about the weather in spring. " * 20] * 20
    data: dict[str, Any] = {"model": "tiny", "metadata": {}, "input": ["the secret", *clean]}
    await pre_call(make(), data, "aembedding")
    assert data["input"] == ["[gone]", *clean]
    assert data["metadata"]["mia_guard"]["rules"] == ["stop", "hide"]
    for given in (["bad", *clean], [*clean, "bad"], "bad"):
        with pytest.raises(HTTPException, match="rule stop"):
            await pre_call(make(SHARE), {"model": "tiny", "metadata": {}, "input": given}, "aembedding")
    await pre_call(make(SHARE), {"model": "tiny", "metadata": {}, "input": clean}, "aembedding")


SCOPED = """\
version: 1
name: scoped
detectors:
  danger: {kind: probe, scope: SCOPE}
  leak: {kind: words, config: tiny, scope: SCOPE}
rules:
  - {name: stop, when: {detector: danger, at_least: 0.9}, action: block, on_error: flag}
  - {name: leak, when: {detector: leak, at_least: 0.5}, action: block}
"""


@pytest.mark.parametrize("scope", ["tool", "system", "user"])
async def test_a_raw_prompt_is_read_as_nobodys_conversation(make: Make, scope: str) -> None:
    """The engine is not asked, whatever the scope, and what reads the model is no less unavailable for it."""
    async with running(FakeEngine(logit=BLOCKED)) as engine:
        guardrail = make(SCOPED.replace("SCOPE", scope), engine=engine.url)
        data: dict[str, Any] = {"model": "tiny", "prompt": "hello", "metadata": {}}
        await pre_call(guardrail, data, "atext_completion")
        assert data["metadata"]["mia_guard"]["rules"] == ["stop"]
        assert not engine.bodies
        if scope != "system":
            with pytest.raises(HTTPException, match="rule leak"):
                await pre_call(guardrail, {**data, "prompt": "the secret"}, "atext_completion")


def items(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, {"type": kind, **fields}]}


def said_by(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": role, "content": [block]}]}


FOUND = [{"type": "text", "text": "secret"}]
RETURNED: dict[str, dict[str, Any]] = {
    "what an MCP server returned": items("mcp_call", name="f", arguments="{}", output="secret"),
    "its error": items("mcp_call", name="f", arguments="{}", error={"content": "secret"}),
    "its tools": items("mcp_list_tools", tools=[{"name": "f", "description": "secret"}]),
    "what a search of files found": items("file_search_call", queries=["a"], results=[{"text": "secret"}]),
    "what code wrote": items("code_interpreter_call", code="a", outputs=[{"type": "logs", "logs": "secret"}]),
    "what a shell wrote": items("local_shell_call_output", output="secret"),
    "what shells wrote": items("shell_call_output", output=[{"stdout": "secret", "stderr": ""}]),
    "what a custom tool returned": items("custom_tool_call_output", output="secret"),
    "what a search found": said_by("assistant", type="web_search_tool_result", content=[{"title": "secret"}]),
    "a page": said_by("assistant", type="web_fetch_tool_result", content={"type": "web_fetch_result", "url": "secret"}),
    "what a sandbox wrote": said_by("assistant", type="code_execution_tool_result", content={"stdout": "secret"}),
    "what an MCP server told": said_by("assistant", type="mcp_tool_result", content=FOUND),
    "a result in the assistant's turn": said_by("assistant", type="tool_result", content="secret"),
    "a result of a search": said_by("user", type="search_result", title="secret", content=[]),
    "a document": said_by("user", type="document", source={"type": "text", "data": "secret"}),
    "a document in parts": said_by("user", type="document", source={"type": "content", "content": FOUND}),
}


@pytest.mark.parametrize("name", list(RETURNED))
async def test_what_tools_of_any_provider_returned_is_a_tools(make: Make, name: str) -> None:
    fields = RETURNED[name]
    call_type = "aresponses" if "input" in fields else "anthropic_messages"
    for scope, stopped in (("tool", True), ("new_tool_results", True), ("assistant", False), ("user", False)):
        data = {"model": "tiny", "metadata": {}, **copy.deepcopy(fields)}
        asked = pre_call(make(SCOPED.replace("SCOPE", scope)), data, call_type)
        if stopped:
            with pytest.raises(HTTPException, match="rule leak"):
                await asked
        else:
            await asked


@pytest.mark.parametrize("fault", [{"event": "garbled"}, {"event": "missing"}, {"error": (500, {}, {})}, None])
async def test_an_engine_that_does_not_answer_is_no_score(make: Make, fault: dict[str, Any] | None) -> None:
    strict = IN_MODEL.replace("on_error: flag", "on_error: block")
    async with running(FakeEngine(**fault or {})) as engine:
        guardrail = make(strict, engine=engine.url if fault else f"http://127.0.0.1:{free_port()}")
        with pytest.raises(HTTPException) as blocked:
            await ask(guardrail, "hello")
    assert blocked.value.status_code == 503


async def test_calls_that_no_policy_can_read_are_refused(make: Make) -> None:
    with pytest.raises(HTTPException, match="image_generation cannot be guarded"):
        await ask(make(), "hello", "image_generation")
    with pytest.raises(HTTPException, match="messages"):
        await make().async_pre_call_hook(None, None, {"model": "tiny", "messages": "hello"}, "acompletion")


async def test_answers_are_judged_whole_and_streamed(make: Make) -> None:
    guardrail = make()
    for text, passes in (("all fine", True), ("the secret", False)):
        message = {"role": "assistant", "content": text}
        whole = litellm.ModelResponse(choices=[{"index": 0, "message": message, "finish_reason": "stop"}])
        if passes:
            assert await guardrail.async_post_call_success_hook({}, None, whole) is whole
        else:
            with pytest.raises(HTTPException, match="No leaks"):
                await guardrail.async_post_call_success_hook({}, None, whole)
        chunks = [chunk_of(part) for part in (text[:6], text[6:])]
        stream = guardrail.async_post_call_streaming_iterator_hook(None, stream_of(chunks), {})
        if passes:
            assert [chunk async for chunk in stream] == chunks
        else:
            with pytest.raises(HTTPException, match="No leaks"):
                await anext(stream)


async def test_answers_are_redacted_where_a_rule_says_so(make: Make) -> None:
    guardrail = make(POLICY.replace("action: block, message: No leaks.", 'action: redact, redact: {replacement: "#"}'))
    message = {"role": "assistant", "content": "the secret is out"}
    whole = litellm.ModelResponse(choices=[{"index": 0, "message": message, "finish_reason": "stop"}])
    changed = await guardrail.async_post_call_success_hook({}, None, whole)
    assert changed.choices[0].message.content == "the # is out"
    chunks = [chunk_of("the sec"), chunk_of("ret is out")]
    seen = [c async for c in guardrail.async_post_call_streaming_iterator_hook(None, stream_of(chunks), {})]
    assert "".join(chunk.choices[0].delta.content for chunk in seen) == "the # is out"


def sse(*events: dict[str, Any]) -> bytes:
    return b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events)


def message_stream(*words: str) -> list[Any]:
    """As LiteLLM passes it on: bytes, cut anywhere."""
    head = {"id": "m", "type": "message", "role": "assistant", "model": "t", "content": [], "stop_reason": None}
    raw = sse(
        {"type": "message_start", "message": {**head, "usage": {"input_tokens": 1, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": w}} for w in words),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )
    return [raw[:50], raw[50:333].decode(), raw[333:]]


def response_stream(*words: str) -> list[Any]:
    """As LiteLLM passes it on: objects, one class for each kind of event."""
    from litellm.types.llms import openai as events

    text = "".join(words)
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    response = {"id": "resp_1", "object": "response", "created_at": 1, "model": "t", "status": "completed"}
    response |= {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "error": None}
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    return [
        events.ResponseCreatedEvent(type="response.created", response={**response, "output": []}),
        *(events.OutputTextDeltaEvent(type="response.output_text.delta", **at, delta=word) for word in words),
        events.OutputTextDoneEvent(type="response.output_text.done", **at, text=text),
        events.ContentPartDoneEvent(type="response.content_part.done", **at, part=part),
        events.OutputItemDoneEvent(type="response.output_item.done", output_index=0, sequence_number=1, item=item),
        events.ResponseCompletedEvent(type="response.completed", response={**response, "output": [item]}),
    ]


def shown(chunks: list[Any]) -> str:
    """All that a client would get of a stream."""
    texts = (one.decode() if isinstance(one, bytes) else one for one in chunks)
    return "".join(one if isinstance(one, str) else one.model_dump_json() for one in texts)


@pytest.mark.parametrize("stream", [message_stream, response_stream])
async def test_streams_of_every_api_are_judged(make: Make, stream: Callable[..., list[Any]]) -> None:
    def through(guardrail: MiaGuardrail, *words: str) -> AsyncIterator[Any]:
        return guardrail.async_post_call_streaming_iterator_hook(None, stream_of(stream(*words)), {})

    passed = [one async for one in through(make(), "all ", "fine")]
    assert shown(passed) == shown(stream("all ", "fine"))
    with pytest.raises(HTTPException, match="No leaks"):
        await anext(through(make(), "the se", "cret"))
    redacting = make(POLICY.replace("action: block, message: No leaks.", 'action: redact, redact: {replacement: "#"}'))
    redacted = [one async for one in through(redacting, "the se", "cret is out")]
    assert [type(one) for one in redacted] == [type(one) for one in passed]
    text = shown(redacted)
    assert "cret" not in text
    assert "#" in text
    assert " is out" in text


@pytest.mark.parametrize("chunks", [[b"data: {nonsense\n\n"], [b"data: {}\n\n", 1], [1], [b"data: {}"] * 2])
async def test_a_stream_that_cannot_be_read_does_not_pass(make: Make, chunks: list[Any]) -> None:
    with pytest.raises(HTTPException) as refused:
        await anext(make().async_post_call_streaming_iterator_hook(None, stream_of(chunks), {}))
    assert refused.value.status_code == 502


async def test_what_litellm_hides_in_an_answer_is_not_judged_and_stays(make: Make) -> None:
    message = {"id": "m", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "fine"}]}
    message["_hidden_params"] = {"group": "secret"}
    assert await make().async_post_call_success_hook({}, None, message) == message
    redacting = make(POLICY.replace("action: block, message: No leaks.", 'action: redact, redact: {replacement: "#"}'))
    message["content"] = [{"type": "text", "text": "a secret"}]
    changed = await redacting.async_post_call_success_hook({}, None, message)
    assert (changed["content"][0]["text"], changed["_hidden_params"]) == ("a #", {"group": "secret"})


def chunk_of(text: str) -> Any:
    return litellm.ModelResponseStream(choices=[{"index": 0, "delta": {"content": text}}])


async def stream_of(chunks: list[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


@pytest.mark.parametrize(("mode", "missing"), [("pre_call", "post_call"), (["post_call"], "pre_call")])
def test_rules_of_a_stage_that_the_mode_leaves_out_stop_the_start(make: Make, mode: Any, missing: str) -> None:
    with pytest.raises(PolicyError, match=rf"policy.yaml:\d+: rules.\d: LiteLLM would never ask it: add {missing}"):
        make(event_hook=mode)


def test_rules_that_litellm_has_no_way_for_stop_the_start(make: Make) -> None:
    steering = "    action: steer\n    steer: [{vector: calm, layer: 3, coefficient: 2}]\n"
    text = IN_MODEL + "  - name: calm\n    when: {detector: danger, at_least: 0.5}\n" + steering
    with pytest.raises(PolicyError, match=r"policy.yaml:\d+: rules.1.action: inside LiteLLM a rule can block"):
        make(text)


@contextmanager
def real_proxy(tmp_path: Path, upstream: str) -> Iterator[str]:
    write_probe(tmp_path / "model_configs" / "probe")
    (tmp_path / "policy.yaml").write_text(IN_MODEL)
    (tmp_path / "config.yaml").write_text(f"""\
model_list:
  - model_name: tiny
    litellm_params: {{model: hosted_vllm/tiny, api_base: "{upstream}/v1", api_key: none}}
guardrails:
  - guardrail_name: mia
    litellm_params:
      guardrail: guard.litellm_guardrail.MiaGuardrail
      mode: [pre_call, post_call]
      default_on: true
      policy: {tmp_path}/policy.yaml
      config_key: tiny
      model_configs: {tmp_path}/model_configs
      engine: {upstream}
general_settings: {{master_key: {MASTER_KEY}}}
""")
    port = free_port()
    command = [str(COMMAND), "--config", str(tmp_path / "config.yaml"), "--host", "127.0.0.1", "--port", str(port)]
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (tmp_path / "litellm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        wait_ready(process, f"http://127.0.0.1:{port}/health/liveliness", tmp_path / "litellm.log")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        end(process)


@pytest.mark.skipif(COMMAND is None, reason="GUARD_TEST_LITELLM names no litellm command; its proxy is 700 MB large")
async def test_the_real_litellm_proxy_blocks_what_the_model_recognises(tmp_path: Path) -> None:
    async with running(FakeEngine()) as engine:
        with real_proxy(tmp_path, engine.url) as url:
            client = openai.AsyncOpenAI(base_url=url, api_key=MASTER_KEY)
            messages: Any = [{"role": "user", "content": "hello"}]
            raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
            assert raw.parse().choices[0].message.content == "The answer is 42."
            assert raw.headers["x-guard-action"] == "allow"
            stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            assert text == "The answer is 42."
            asked = len(engine.bodies)
            assert [spec is not None for spec in engine.specs] == [True, False, True, False]
            engine.logit = BLOCKED
            for streamed in (False, True):
                with pytest.raises(openai.BadRequestError) as blocked:
                    await client.chat.completions.create(model="tiny", messages=messages, stream=streamed)
                assert "rule stop" in str(blocked.value)
            # Twice read, never answered, never tried again.
            assert len(engine.bodies) == asked + 2


def test_importing_the_guard_does_not_load_litellm() -> None:
    code = "import sys, guard.cli, guard.serve; sys.exit('litellm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
