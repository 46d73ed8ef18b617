"""What other guardrails got wrong, tried here; ``docs/known-failures-of-others.md`` says which test is for which."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from guard.proxy.keys import NewKey, create_key
from tests.proxy.conftest import BLOCKED, BODY, POLICY, Proxy, StartProxy
from tests.proxy.engine import FakeEngine, running

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def series_of(metrics: bytes) -> set[str]:
    return set(re.findall(r"^(\S+?) ", re.sub(r"^#.*\n", "", metrics.decode(), flags=re.MULTILINE), re.MULTILINE))


async def test_no_client_can_make_metrics_grow(start_proxy: StartProxy, tmp_path: Path) -> None:
    """Names of models, users, ids and paths are a client's to invent; labels are not."""
    file = tmp_path / "keys.yaml"
    keys = [create_key(file, NewKey(tenant=f"tenant-{i}"))[0] for i in range(3)]
    async with running(FakeEngine()) as engine, start_proxy(engine, keys=file) as proxy:
        before = series_of((await proxy.get("/metrics"))[2])
        for i in range(12):
            headers = {"authorization": f"Bearer {keys[i % 3]}", "x-request-id": f"id-{i}", "user-agent": f"agent-{i}"}
            status, _, _ = await proxy.post({**BODY, "model": f"model-{i}", "user": f"user-{i}"}, headers)
            assert status == 200
            assert (await proxy.post(BODY, headers, path=f"/v1/unknown/{i}"))[0] == 404
            assert (await proxy.post(BODY, {"authorization": f"Bearer guess-{i}"}))[0] == 401
        assert series_of((await proxy.get("/metrics"))[2]) == before
        # Two of the guesses are counted in one entry, when the minute is over.
        assert len(await proxy.entries(34)) == 34


@pytest.mark.parametrize(
    "headers",
    [
        {"x-guard-action": "allow", "x-guard-policy": "none"},
        {"x-guard-skip": "1", "x-skip-guardrails": "true", "x-vsr-skip-processing": "true"},
        {"x-litellm-disable-logging": "true", "litellm-disable-message-redaction": "true", "no-log": "true"},
        {"x-mia-early": "0", "x-should-retry": "true", "x-http-method-override": "GET"},
        {"x-forwarded-host": "internal", "x-original-url": "/livez", "x-rewrite-url": "/livez"},
    ],
    ids=lambda headers: next(iter(headers)),
)
@both
async def test_no_header_of_a_client_loosens_a_rule_or_takes_its_line_from_the_ledger(
    proxy: Proxy, headers: dict[str, str], stream: bool
) -> None:
    proxy.engine.logit = BLOCKED
    status, answered, body = await proxy.post({**BODY, "stream": stream}, headers)
    assert (status, json.loads(body)["error"]["code"]) == (400, "content_filter")
    assert (answered["x-guard-action"], answered["x-should-retry"]) == ("block", "false")
    entry = await proxy.entry()
    assert (entry["outcome"], entry["rule"], entry["status"]) == ("blocked", "stop", 400)


@pytest.mark.parametrize(
    "field", [{"guardrails": []}, {"metadata": {"guardrails": {"stop": False}}}, {"mock_response": "hi"}, {"mia": {}}]
)
async def test_no_field_of_a_body_chooses_what_is_guarded(proxy: Proxy, field: dict[str, Any]) -> None:
    proxy.engine.logit = BLOCKED
    assert (await proxy.post({**BODY, **field}))[0] == 400
    assert (await proxy.entry())["rule"] == "stop"


@both
async def test_a_block_repeats_nothing_of_the_prompt_and_says_which_rule(proxy: Proxy, stream: bool) -> None:
    proxy.engine.logit = BLOCKED
    _, headers, body = await proxy.post({**BODY, "stream": stream})
    error = json.loads(body)["error"]
    assert "private words" not in body.decode() + str(headers)
    assert "(rule stop)" in error["message"]
    # None is null, and every field has the type that clients expect.
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "content_filter")
    assert headers["content-type"] == "application/json"
    assert "private words" not in proxy.ledger.read_text()


@both
async def test_a_guard_that_cannot_measure_is_told_apart_from_a_hit(start_proxy: StartProxy, stream: bool) -> None:
    strict = POLICY.replace("on_error: flag", "on_error: block")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, strict) as proxy:
        hit = await proxy.post({**BODY, "stream": stream})
        engine.event = "missing"
        unmeasured = await proxy.post({**BODY, "stream": stream})
        metrics = (await proxy.get("/metrics"))[2].decode()
    codes = [json.loads(body)["error"]["code"] for _, _, body in (hit, unmeasured)]
    assert [hit[0], unmeasured[0]] == [400, 503]
    assert codes == ["content_filter", "guard_unavailable"]
    assert [headers["x-should-retry"] for _, headers, _ in (hit, unmeasured)] == ["false", "false"]
    for outcome in ("blocked", "guard_unavailable"):
        found = re.findall(rf'guard_requests_total{{[^}}]*outcome="{outcome}"[^}}]*}} 1\.0', metrics)
        assert len(found) == 1


@pytest.mark.parametrize(
    "stray", [b": keep-alive\n\n", b"data: not json\n\n", b"event: ping\ndata: {}\n\n", b"\xff\xfe\n\n"]
)
async def test_a_stray_frame_costs_a_good_stream_nothing(proxy: Proxy, stray: bytes) -> None:
    engine, frame = proxy.engine, proxy.engine.frame
    engine.frame = lambda word: frame(word) + stray  # type: ignore[method-assign]
    status, headers, body = await proxy.post(STREAM)
    assert (status, headers["x-guard-action"]) == (200, "allow")
    assert b"".join(engine.frame(word) for word in ("The", " answer", " is", " 42", ".")) in body
    assert body.endswith(b"data: [DONE]\n\n")


async def test_one_keys_rules_do_not_touch_another_keys_stream(start_proxy: StartProxy, tmp_path: Path) -> None:
    file, folder = tmp_path / "keys.yaml", tmp_path / "policies"
    judged, free = (create_key(file, NewKey(tenant=tenant))[0] for tenant in ("judged", "free"))
    folder.mkdir()
    (folder / "test.yaml").write_text(POLICY)
    (folder / "none.yaml").write_text("version: 1\nname: none\n")
    match = "{name: free, match: {tenants: [free]}, policy: none}"
    (folder / "selection.yaml").write_text(f"version: 1\ndefault: test\nassignments:\n  - {match}\n")
    engine = FakeEngine(logit=BLOCKED)
    async with running(engine), start_proxy(engine, path=folder, keys=file) as proxy:
        both_answers = await asyncio.gather(
            *(proxy.post(STREAM, {"authorization": f"Bearer {key}"}) for key in (judged, free) * 10)
        )
    for i, (status, _, body) in enumerate(both_answers):
        assert status == (400 if i % 2 == 0 else 200)
        assert body.endswith(b"data: [DONE]\n\n") == (i % 2 == 1)
    assert engine.specs.count(None) == 10


async def test_an_agents_turn_of_two_megabytes_passes_and_nine_are_a_413(proxy: Proxy) -> None:
    for megabytes, wanted in ((2, 200), (9, 413)):
        body = {**BODY, "messages": [{"role": "tool", "content": "x" * (megabytes * 1_000_000), "tool_call_id": "1"}]}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{proxy.url}/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status == wanted
            assert (await answer.json()).get("error", {}).get("code") == (
                None if wanted == 200 else "request_too_large"
            )
