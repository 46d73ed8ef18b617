"""Tokens are charged as the model server used them: no shape of an answer and no way to leave it is free."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from guard.proxy.keys import Limits, NewKey, create_key
from tests.proxy.conftest import BODY, POLICY, Proxy, StartProxy, eventually
from tests.proxy.detectors import register
from tests.proxy.engine import WORDS, FakeEngine, running
from tests.proxy.test_endpoints import BODIES, CHAT, COMPLETIONS, MESSAGES, RESPONSES

TEXT_RULE = """\
version: 1
name: test
streaming: STREAMING
detectors: {d: {kind: words}}
rules:
  - {name: out, stage: output, when: {detector: d, at_least: 1}, action: block, on_error: allow}
"""
MESSAGE = {"role": "assistant", "content": 'He wrote "usage": {"data: [DONE]\n\ndata: {}'}
USAGE = {"prompt_tokens": 5, "completion_tokens": 40, "total_tokens": 45}
WHOLE = {"id": "x", "choices": [{"index": 0, "message": MESSAGE, "finish_reason": "stop"}], "usage": USAGE}


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def stream_with_usage(engine: FakeEngine, *, spaced: bool) -> list[bytes]:
    end = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE}
    separators = (", ", ": ") if spaced else (",", ":")
    words = [engine.frame(word) for word in ("It", " is", " secret")]
    return [*words, b"data: " + json.dumps(end, separators=separators).encode() + b"\n\n", b"data: [DONE]\n\n"]


@contextlib.asynccontextmanager
async def hung_up(
    proxy: Proxy, body: dict[str, Any], headers: dict[str, str] | None = None, *, path: str = CHAT
) -> Any:
    """A client that leaves when the block ends."""
    async with aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.post(proxy.url + path, json=body, headers=headers).__aenter__())
        yield asked
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("plugin", [True, False])
async def test_a_whole_answer_counts_whatever_its_text_says_and_however_it_is_spaced(
    start_proxy: StartProxy, plugin: bool, indent: int | None
) -> None:
    engine = FakeEngine(body=json.dumps(WHOLE, indent=indent).encode())
    async with running(engine), start_proxy(engine, upstream_plugin=plugin) as proxy:
        assert (await proxy.post())[0] == 200
        assert (await proxy.entry())["tokens"] == {"prompt": 5, "completion": 40, "charged": 45}


@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("streaming", ["hold", "window", "observe"])
async def test_a_blocked_stream_costs_what_was_generated_and_tells_the_client_what_it_got(
    start_proxy: StartProxy, streaming: str, spaced: bool
) -> None:
    engine = FakeEngine()
    engine.frames = stream_with_usage(engine, spaced=spaced)
    policy = TEXT_RULE.replace("STREAMING", streaming)
    async with running(engine), start_proxy(engine, policy, upstream_plugin=False) as proxy:
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        status, _, raw = await proxy.post(body)
        entry = await proxy.entry()
    assert (entry["outcome"], entry["tokens"]) == ("blocked", {"prompt": 5, "completion": 40, "charged": 45})
    if status == 200:
        told = [json.loads(frame[6:]) for frame in raw.split(b"\n\n") if b'"usage":{' in frame][-1]["usage"]
        assert told["prompt_tokens"] == 5
        assert told["completion_tokens"] <= 3


async def test_a_stream_that_is_cut_and_told_no_usage_costs_the_frames_that_came(start_proxy: StartProxy) -> None:
    policy = TEXT_RULE.replace("STREAMING", "window").replace("stage: output", "stage: stream")
    engine = FakeEngine(scripts=[("A", " b", " secret", " c")])
    async with running(engine), start_proxy(engine, policy) as proxy:
        await proxy.post({**BODY, "stream": True})
        entry = await proxy.entry()
    assert entry["outcome"] == "blocked"
    assert entry["tokens"]["completion"] >= 3
    assert entry["tokens"]["charged"] >= entry["tokens"]["completion"]


@pytest.mark.parametrize(
    ("limit", "charged"), [({"max_tokens": 30}, 30), ({"max_completion_tokens": 9, "n": 3}, 27), ({}, 4096)]
)
@pytest.mark.parametrize("plugin", [True, False])
async def test_a_client_that_leaves_a_whole_answer_pays_for_what_it_asked(
    start_proxy: StartProxy, tmp_path: Path, plugin: bool, limit: dict[str, int], charged: int
) -> None:
    file = tmp_path / "keys.yaml"
    key = create_key(file, NewKey(limits=Limits(tokens_per_min=20)))[0]
    headers = {"authorization": f"Bearer {key}"}
    engine = FakeEngine(answer_delay_s=None)
    async with running(engine), start_proxy(engine, keys=file, upstream_plugin=plugin) as proxy:
        async with hung_up(proxy, {**BODY, **limit}, headers):
            await eventually(lambda: engine.open == 1)
            # The plugin's readouts of the prompt come first.
            await asyncio.sleep(0.3)
        await eventually(lambda: engine.open == 0)
        entry = await proxy.entry()
        assert entry["outcome"] == "client_gone"
        # 7 by the plugin; else of "private words" every other letter, and what a template adds.
        prompt = 7 if plugin else 15
        assert entry["tokens"]["charged"] == charged + prompt
        assert (await proxy.post(headers=headers))[0] == 429


@pytest.mark.parametrize(
    ("path", "limits", "charged"),
    [
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2000}, 2000),
        (CHAT, {"max_tokens": 2000, "max_output_tokens": 0}, 2000),
        (CHAT, {"max_tokens": 30, "max_completion_tokens": None}, 30),
        (COMPLETIONS, {"max_tokens": 2000, "max_completion_tokens": 1}, 2000),
        (RESPONSES, {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 2000}, 2000),
        (RESPONSES, {"max_tokens": 1}, 4096),
        (MESSAGES, {"max_tokens": 2000, "max_output_tokens": 1, "max_completion_tokens": 1}, 2000),
    ],
)
async def test_only_the_limit_that_an_api_reads_bounds_what_is_charged(
    start_proxy: StartProxy, path: str, limits: dict[str, Any], charged: int
) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "max_tokens"}
    async with running(FakeEngine(answer_delay_s=None)) as engine, start_proxy(engine) as proxy:
        async with hung_up(proxy, {**body, **limits}, path=path):
            await eventually(lambda: engine.open == 1)
            await asyncio.sleep(0.3)
        assert charged <= (await proxy.entry())["tokens"]["charged"] < charged + 100


async def test_a_judged_stream_costs_what_came_though_the_client_leaves(start_proxy: StartProxy) -> None:
    policy = TEXT_RULE.replace("STREAMING", "hold")
    async with running(FakeEngine(answer_delay_s=None)) as engine, start_proxy(engine, policy) as proxy:
        async with hung_up(proxy, {**BODY, "stream": True}):
            await eventually(lambda: engine.open == 1)
            await asyncio.sleep(0.3)
        entry = await proxy.entry()
    assert entry["outcome"] == "client_gone"
    assert entry["tokens"]["charged"] == 5 + 15


async def test_without_plugin_and_usage_a_prompt_costs_no_less_than_its_tokens(start_proxy: StartProxy) -> None:
    odd = "\U0001f9ff7%" * 100
    async with running(FakeEngine()) as engine, start_proxy(engine, upstream_plugin=False) as proxy:
        await proxy.post({**BODY, "stream": True, "messages": [{"role": "user", "content": odd}]})
        await proxy.post({"model": "tiny", "stream": True, "prompt": list(range(500))}, path="/v1/completions")
        one, two = await proxy.entries(2)
    assert one["tokens"]["charged"] >= 600
    assert two["tokens"]["charged"] >= 500


STREAMS: dict[str, tuple[str, Any, Any]] = {
    "chat": (CHAT, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
             lambda word: {"choices": [{"index": 0, "delta": {"content": word}}]}),
    "a tool's call": (CHAT, {"choices": [{"index": 0, "delta": {"role": "assistant"}}]},
                      lambda word: {"choices": [{"index": 0, "delta": {"tool_calls": [
                          {"index": 0, "function": {"arguments": word}}]}}]}),
    "completions": (COMPLETIONS, {"choices": [{"index": 0, "text": ""}]},
                    lambda word: {"choices": [{"index": 0, "text": word}]}),
    "responses": (RESPONSES, {"type": "response.created", "response": {"object": "response", "output": []}},
                  lambda word: {"type": "response.output_text.delta", "output_index": 0, "content_index": 0,
                                "item_id": "m", "delta": word}),
    "messages": (MESSAGES, {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                 lambda word: {"type": "content_block_delta", "index": 0,
                               "delta": {"type": "text_delta", "text": word}}),
}  # fmt: skip


@pytest.mark.parametrize("rules", [True, False])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("name", list(STREAMS))
async def test_of_a_stream_that_told_no_usage_the_tokens_that_came_are_told(
    start_proxy: StartProxy, name: str, separators: tuple[str, str], rules: bool
) -> None:
    path, head, part = STREAMS[name]
    events = [head, *(part(word) for word in ('"', " is\n", " {}"))]
    engine = FakeEngine(
        frames=[b"data: " + json.dumps(one, separators=separators).encode() + b"\n\n" for one in events]
    )
    policy = TEXT_RULE.replace("STREAMING", "window") if rules else POLICY
    async with running(engine), start_proxy(engine, policy, upstream_plugin=False) as proxy:
        await proxy.post({**BODIES[path], "stream": True}, path=path)
        entry = await proxy.entry()
    assert entry["outcome"] == ("upstream_unavailable" if rules else "upstream_broken")
    assert (entry["tokens"]["completion"], entry["tokens"]["prompt"]) == (3, None)
    assert entry["tokens"]["charged"] >= 3


@pytest.mark.parametrize("streaming", ["hold", "window", "observe", None])
async def test_a_whole_stream_without_a_usage_has_its_tokens_and_several_in_a_frame_are_not_known(
    start_proxy: StartProxy, streaming: str | None
) -> None:
    policy = TEXT_RULE.replace("STREAMING", streaming) if streaming else POLICY
    async with running(FakeEngine()) as engine, start_proxy(engine, policy) as proxy:
        await proxy.post({**BODY, "stream": True})
        await proxy.post({**BODY, "stream": True, "stream_interval": 4})
        one, several = await proxy.entries(2)
    assert (one["outcome"], one["tokens"]["completion"]) == ("completed", len(WORDS))
    assert one["tokens"]["charged"] >= len(WORDS)
    assert several["tokens"]["completion"] is None


LONG = "word " * 400


@pytest.mark.parametrize("interval", [1000, "1000", 1000.0])
@pytest.mark.parametrize("rule", [None, "flag", "block"])
async def test_many_tokens_in_one_frame_of_a_stream_are_not_one(
    start_proxy: StartProxy, interval: Any, rule: str | None
) -> None:
    policy = TEXT_RULE.replace("STREAMING", "window").replace("action: block", f"action: {rule}") if rule else POLICY
    engine = FakeEngine(scripts=[("A ", LONG + "1234")])
    async with running(engine), start_proxy(engine, policy) as proxy:
        await proxy.post({**BODY, "stream": True, "stream_interval": interval})
        # Of the prompt 7 where the plugin reads it, else 15.
        assert 7 + 400 <= (await proxy.entry())["tokens"]["charged"] < 4000
        await proxy.post({**BODY, "stream": True, "stream_interval": 1})
        assert (await proxy.entries(2))[1]["tokens"]["charged"] <= 15 + 8


@pytest.mark.parametrize("number", [3, "3", 3.0])
async def test_choices_cost_however_their_number_is_written(start_proxy: StartProxy, number: Any) -> None:
    engine = FakeEngine(answer_delay_s=None)
    async with running(engine), start_proxy(engine) as proxy:
        async with hung_up(proxy, {**BODY, "n": number, "max_tokens": 100}):
            await eventually(lambda: engine.open == 1)
            await asyncio.sleep(0.3)
        assert (await proxy.entry())["tokens"]["charged"] == 300 + 7


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
PICTURES: dict[str, tuple[str, list[Any]]] = {
    "chat": ("/v1/chat/completions", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]),
    "chat, no type": ("/v1/chat/completions", [{"video_url": "http://a"}, {"type": "text", "text": "image_url"}]),
    "responses": ("/v1/responses", [{"type": "input_image", "image_url": "http://a"}]),
    "messages": ("/v1/messages", [IMAGE]),
    "a tool's result": ("/v1/messages", [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]),
    "a sound": ("/v1/chat/completions", [{"type": "input_audio", "input_audio": {"data": "aaaa", "format": "wav"}}]),
}


@pytest.mark.parametrize("name", list(PICTURES))
async def test_without_plugin_and_usage_a_picture_costs_no_less_than_models_make_of_it(
    start_proxy: StartProxy, name: str
) -> None:
    path, content = PICTURES[name]
    turns = [{"role": "user", "content": content}]
    asked = {
        "model": "tiny",
        "stream": True,
        "max_tokens": 5,
        "input" if path == "/v1/responses" else "messages": turns,
    }
    async with running(FakeEngine()) as engine, start_proxy(engine, upstream_plugin=False) as proxy:
        await proxy.post(asked, path=path)
        assert 16384 <= (await proxy.entry())["tokens"]["charged"] < 2 * 16384


async def test_an_answer_that_a_policy_has_generated_again_costs_each_time(start_proxy: StartProxy) -> None:
    policy = TEXT_RULE.replace("STREAMING", "hold").replace("action: block", "action: route, route: {model: other}")
    engine = FakeEngine(scripts=[("It", " is", " secret"), ("It", " is", " not")])
    async with running(engine), start_proxy(engine, policy) as proxy:
        assert (await proxy.post())[0] == 200
        assert len(engine.bodies) == 2
        assert (await proxy.entry())["tokens"] == {"prompt": 7, "completion": 5, "charged": 24}


async def test_what_never_reached_a_model_server_or_was_refused_there_costs_nothing(start_proxy: StartProxy) -> None:
    error = (400, {"error": {"message": "no", "code": 400}}, {})
    async with running(FakeEngine(error=error)) as engine, start_proxy(engine) as proxy:
        assert (await proxy.post())[0] == 400
        assert (await proxy.entry())["tokens"]["charged"] == 0
    async with start_proxy(engine, POLICY) as proxy:
        assert (await proxy.post())[0] == 502
        assert (await proxy.entries(2))[1]["tokens"]["charged"] == 0
