"""What a client sees of each action, streamed and not, and what the engine is asked."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from guard.mia.spec import MiaSpec
from tests.proxy.conftest import BLOCKED, BODY, CLEAN, FLAGGED, POLICY, STEERED, Proxy, StartProxy, eventually
from tests.proxy.engine import WORDS, FakeEngine, running

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def client(proxy: Proxy) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused")


async def test_an_allowed_answer_is_byte_for_byte_the_engines(proxy: Proxy) -> None:
    status, headers, body = await proxy.post()
    assert (status, body) == (200, proxy.engine.whole())
    assert headers["content-type"].startswith("application/json")
    assert headers["x-guard-action"] == "allow"
    assert headers["x-guard-policy"].startswith("test@")
    assert "x-guard-rules" not in headers
    status, headers, body = await proxy.post(STREAM)
    assert (status, body) == (200, b"".join(map(proxy.engine.frame, WORDS)) + b"data: [DONE]\n\n")
    assert headers["content-type"].startswith("text/event-stream")


async def test_the_engine_gets_the_clients_body_and_our_field_alone(proxy: Proxy) -> None:
    body = {**BODY, "unknown": [1, 2.5, None, "ä 😀"], "vllm_xargs": {"other": 1}, "temperature": 0.1}
    await proxy.post(body)
    (got,) = proxy.engine.bodies
    spec = MiaSpec.model_validate_json(got["vllm_xargs"].pop("mia"))
    assert got == body
    assert list(spec.hidden) == ["danger.layer3"]
    assert not spec.steer


async def test_the_engines_field_is_taken_off_when_it_comes_with_the_answer(proxy: Proxy) -> None:
    proxy.engine.event_in_field = True
    assert (await proxy.post())[2] == proxy.engine.whole()
    proxy.engine.logit = BLOCKED
    assert (await proxy.post())[0] == 400


@both
async def test_a_block_is_a_400_before_the_first_byte_and_stops_the_engine(proxy: Proxy, stream: bool) -> None:
    proxy.engine.logit, proxy.engine.answer_delay_s = BLOCKED, None
    with pytest.raises(openai.BadRequestError) as caught:
        await client(proxy).chat.completions.create(**{**BODY, "stream": stream})
    error = caught.value
    assert (error.status_code, error.code) == (400, "content_filter")
    assert "stop" in str(error)
    assert "private words" not in error.response.text
    assert error.response.headers["x-guard-action"] == "block"
    assert error.response.headers["x-guard-rules"] == "stop,watch"
    assert error.response.headers["x-should-retry"] == "false"
    await eventually(lambda: proxy.engine.open == 0)
    assert (proxy.engine.aborted, len(proxy.engine.bodies)) == (1, 1)


def test_a_block_reads_the_same_through_the_blocking_client(start_proxy: StartProxy) -> None:
    async def run() -> None:
        async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine) as proxy:
            sync = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="unused")
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await asyncio.to_thread(sync.chat.completions.create, **{**BODY, "stream": stream})
                assert caught.value.code == "content_filter"

    asyncio.run(run())


@both
async def test_a_flag_passes_the_answer_and_says_so(proxy: Proxy, stream: bool) -> None:
    proxy.engine.logit = FLAGGED
    status, headers, body = await proxy.post({**BODY, "stream": stream})
    assert status == 200
    assert (headers["x-guard-action"], headers["x-guard-rules"]) == ("flag", "watch")
    assert b"42" in body


@both
async def test_a_steered_answer_is_asked_for_anew_and_the_first_one_stopped(proxy: Proxy, stream: bool) -> None:
    proxy.engine.logit, proxy.engine.word_delay_s = STEERED, 0.05
    status, headers, body = await proxy.post({**BODY, "stream": stream})
    assert (status, headers["x-guard-action"], headers["x-guard-rules"]) == (200, "steer", "calm,watch")
    assert b"steered" in body
    assert b"42" not in body
    reading, steering = proxy.engine.specs
    assert "hidden" in reading
    assert "steer" not in reading
    assert steering == {"steer": [{"vector": "calm", "layer": 3, "coefficient": 2.0}]}
    if stream:
        assert proxy.engine.aborted == 1


async def test_an_engine_that_cannot_steer_is_not_the_clients_mistake(proxy: Proxy) -> None:
    proxy.engine.logit, proxy.engine.refuses_steering = STEERED, True
    status, headers, body = await proxy.post()
    assert (status, json.loads(body)["error"]["code"]) == (502, "steering_unavailable")
    assert headers["x-should-retry"] == "false"


async def test_the_first_byte_is_held_until_the_verdict(proxy: Proxy) -> None:
    proxy.engine.event_after_frames = 2
    proxy.engine.logit = BLOCKED
    status, _, body = await proxy.post(STREAM)
    assert status == 400
    assert b"The" not in body
    proxy.engine.logit = CLEAN
    assert (await proxy.post(STREAM))[2] == b"".join(map(proxy.engine.frame, WORDS)) + b"data: [DONE]\n\n"


@both
async def test_a_shadow_policy_changes_nothing_and_records_what_it_would_do(
    start_proxy: StartProxy, stream: bool
) -> None:
    shadow = POLICY.replace("name: test\n", "name: test\nmode: shadow\n")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, shadow) as proxy:
        status, headers, _ = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-action"]) == (200, "allow")
        entry = await proxy.entry()
        assert (entry["action"], entry["would"], entry["rules"]) == ("allow", "block", [])
        assert [(hit["rule"], hit["mode"]) for hit in entry["hits"]] == [("stop", "shadow"), ("watch", "shadow")]
        assert (
            b'guard_rule_hits_total{action="block",mode="shadow",policy="test",rule="stop"} 1.0'
            in (await proxy.get("/metrics"))[2]
        )


async def test_a_shadow_policy_does_not_hold_a_stream_for_readouts_that_are_late(start_proxy: StartProxy) -> None:
    shadow = POLICY.replace("name: test\n", "name: test\nmode: shadow\n")
    engine = FakeEngine(event="missing", answer_delay_s=None)
    async with running(engine), start_proxy(engine, shadow) as proxy, asyncio.timeout(5):
        stream = await client(proxy).chat.completions.create(**STREAM)
        assert (await anext(stream)).choices[0].delta.content == "The"
        await stream.close()


async def test_a_policy_without_detectors_asks_for_nothing(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, "{version: 1, name: empty}") as proxy:
        assert (await proxy.post())[0] == 200
        assert engine.specs == [None]


async def test_the_official_client_streams_and_reads_the_request_id(proxy: Proxy) -> None:
    raw = await client(proxy).chat.completions.with_raw_response.create(
        **STREAM, extra_headers={"x-request-id": "my-1"}
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in raw.parse()])
    assert text == "".join(WORDS)
    assert raw.headers["x-request-id"] == "my-1"
    own = raw.headers["x-guard-request-id"]
    assert proxy.engine.headers[0]["x-request-id"] == own != "my-1"
    entry = await proxy.entry()
    assert (entry["request_id"], entry["client_request_id"]) == (own, "my-1")
    assert [model.id async for model in client(proxy).models.list()] == ["tiny"]


async def test_one_model_is_found_by_its_name_and_another_is_not(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(served=("tiny", "org/tiny-2"))) as engine, start_proxy(engine) as proxy:
        for name in engine.served:
            model = await client(proxy).models.retrieve(name)
            assert (model.id, model.object) == (name, "model")
        for name in ("tin", "org", "org/tiny-2/", "../models"):
            with pytest.raises(openai.NotFoundError) as caught:
                await client(proxy).models.retrieve(name)
            assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
