"""Rules that judge answers, and actions that change prompt or answer: redact, retry, route."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from guard.cli import app
from tests.proxy.conftest import BLOCKED, BODY, CLEAN, FLAGGED, POLICY, STEERED, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import WORDS, FakeEngine, running
from tests.proxy.test_streaming import DONE, LEAK, chunk, chunks, policy, said

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
CALM = "    steer: [{vector: calm, layer: 3, coefficient: 2}]\n"
RETRY = policy("hold", stage="output", action="retry", more=CALM)
REDACT = policy("window", action="redact", more="    redact: {replacement: '[X]'}\n")


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def text_of(body: bytes, stream: bool) -> str:
    return said(chunks(body)) if stream else json.loads(body)["choices"][0]["message"]["content"]


DRIFTING = """\
version: 1
name: test
detectors:
  danger: {kind: probe}
  drift: {kind: drift}
rules:
  - {name: prompt, when: {detector: danger, at_least: 0.9}, action: block, on_error: allow}
  - name: drifted
    stage: output
    when: {all: [{detector: drift, at_least: 2}, {detector: danger, below: 0.9}]}
    action: block
    on_error: block
"""


@both
async def test_readouts_of_the_answer_are_judged_at_its_end(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(final_logits=[1.0, 3.0])
    async with running(engine), start_proxy(engine, DRIFTING) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, text_of(body, stream)) == (200, "".join(WORDS))
        assert b"mia" not in body
        assert engine.specs[0] is not None
        assert engine.specs[0]["hidden"]["drift.rows"] == {"layer": 3, "positions": "generated"}
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-rules"], json.loads(body)["error"]["code"]) == (
            400,
            "drifted",
            "content_filter",
        )
        engine.final_logits = []
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 503
        first, second, third = await proxy.entries(3)
        assert (first["scores"].keys(), first["answer"]["scores"]["drift"]) == ({"danger"}, 1.0)
        assert (second["answer"]["action"], second["answer"]["scores"]["drift"]) == ("block", 3.0)
        assert third["answer"]["detectors"]["drift"].startswith("unavailable")


async def test_only_answers_being_read_holds_no_prompt(start_proxy: StartProxy) -> None:
    text = DRIFTING.replace(
        "  - {name: prompt, when: {detector: danger, at_least: 0.9}, action: block, on_error: allow}\n", ""
    )
    text = text.replace("  danger: {kind: probe}\n", "").replace(", {detector: danger, below: 0.9}", "")
    engine = FakeEngine(final_logits=[1.0, 3.0], event="missing")
    async with running(engine), start_proxy(engine, text) as proxy:
        assert (await proxy.post(STREAM))[0] == 200
        assert (await proxy.post(BODY))[0] == 400
        assert "x-mia-early" not in engine.headers[1]


async def test_an_engine_that_refuses_to_read_answers_makes_their_scores_missing(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(refuses_reading=True)) as engine, start_proxy(engine, DRIFTING) as proxy:
        assert (await proxy.post(BODY))[0] == 503


@both
async def test_retry_generates_again_with_the_vectors_and_judges_it(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(scripts=[LEAK, ("all", " fine")])
    async with running(engine), start_proxy(engine, RETRY) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, text_of(body, stream)) == (200, "all fine")
        assert engine.specs[1] is not None
        assert engine.specs[1]["steer"] == [{"vector": "calm", "layer": 3, "coefficient": 2.0}]
        entry = await proxy.entry()
        answer = entry["answer"]
        assert (answer["attempts"], answer["scores"], answer["action"]) == (1, {"text": 0.0}, "allow")
        (earlier,) = answer["earlier"]
        assert (earlier["scores"], earlier["action"]) == ({"text": 1.0}, "retry")


@both
async def test_a_retry_that_succeeded_is_told_as_one_wherever_a_request_is_told(
    start_proxy: StartProxy, stream: bool
) -> None:
    engine = FakeEngine(scripts=[LEAK, ("all", " fine")])
    async with running(engine), start_proxy(engine, RETRY) as proxy:
        status, headers, _ = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-action"], headers["x-guard-rules"]) == (200, "retry", "leak")
        entry = await proxy.entry()
        assert (entry["outcome"], entry["action"], entry["prompt_action"]) == ("completed", "retry", "allow")
        assert (entry["rule"], entry["rules"], entry["reason"]) == ("leak", ["leak"], "text 1 >= 0.5")
        assert [(hit["rule"], hit["action"]) for hit in entry["hits"]] == [("leak", "retry")]
        metrics = (await proxy.get("/metrics"))[2].decode()
        labels = 'action="retry",outcome="completed",policy="test",route="/v1/chat/completions"'
        assert f"guard_requests_total{{{labels}}} 1.0" in metrics
        assert 'guard_rule_hits_total{action="retry",mode="enforce",policy="test",rule="leak"} 1.0' in metrics
        found = CliRunner().invoke(app, ["ledger", "query", "--ledger", str(proxy.ledger), "--action", "retry"])
        assert (found.exit_code, entry["request_id"] in found.stdout) == (0, True)


@both
async def test_retry_ends_with_a_block_when_every_answer_hits(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(scripts=[LEAK])
    async with running(engine), start_proxy(engine, RETRY + "    attempts: 2\n") as proxy:
        engine.scripts = [LEAK, LEAK]
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-action"]) == (400, "block")
        assert len(engine.bodies) == 3
        assert b"secret" not in body
        entry = await proxy.entry()
        assert (entry["outcome"], entry["action"], entry["answer"]["attempts"]) == ("blocked", "block", 2)


@both
async def test_route_at_the_prompt_asks_the_other_model(start_proxy: StartProxy, stream: bool) -> None:
    text = POLICY.replace("action: block", "action: route\n    route: {model: safe}")
    async with (
        running(FakeEngine(logit=BLOCKED)) as engine,
        start_proxy(engine, text) as proxy,
    ):
        status, headers, _ = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-action"], headers["x-guard-rules"]) == (200, "route", "stop,watch")
        assert [body["model"] for body in engine.bodies] == ["tiny", "safe"]
        assert {**engine.bodies[1], "model": "tiny", "vllm_xargs": None} == {
            **engine.bodies[0],
            "vllm_xargs": None,
        } or (engine.bodies[1] == {**BODY, "stream": stream, "model": "safe"})
        engine.unserved = ("safe",)
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, json.loads(body)["error"]["code"]) == (502, "routing_unavailable")
        assert [e["model"] for e in await proxy.entries(2)] == ["tiny", "tiny"]


@both
async def test_route_after_the_answer_asks_once_and_then_blocks(start_proxy: StartProxy, stream: bool) -> None:
    text = policy("hold", stage="output", action="route", more="    route: {model: safe}\n")
    engine = FakeEngine(scripts=[LEAK, ("fine",)])
    async with running(engine), start_proxy(engine, text) as proxy:
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        assert (status, text_of(body, stream)) == (200, "fine")
        assert [one["model"] for one in engine.bodies] == ["tiny", "safe"]
        assert headers["x-guard-action"] == "route"
        entry = await proxy.entry()
        assert (entry["action"], entry["rules"]) == ("route", ["leak"])
        answer = entry["answer"]
        assert (answer["action"], [one["action"] for one in answer["earlier"]]) == ("allow", ["route"])
        engine.scripts = [LEAK]
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 400
        assert len(engine.bodies) == 4


PROMPT_REDACTION = POLICY.replace(
    "action: block", "action: redact\n    redact: {messages: [SELECT], replacement: gone}"
)
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "rules"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "d"}}],
    },
    {"role": "assistant", "content": "yes", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "poison", "tool_call_id": "a"},
    {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}]},
]


@pytest.mark.parametrize(
    ("selector", "changed"),
    [
        ("new_tool_results", {(3, None): "gone"}),
        ("user.first", {(1, 0): "gone"}),
        ("user.last.part.-1", {(4, 1): "gone"}),
        ("message.0", {(0, None): "gone"}),
    ],
)
async def test_redact_replaces_the_messages_that_are_meant_and_nothing_else(
    start_proxy: StartProxy, selector: str, changed: dict[tuple[int, int | None], str]
) -> None:
    text = PROMPT_REDACTION.replace("SELECT", selector)
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, text) as proxy:
        body = {**BODY, "messages": CONVERSATION, "stream": True}
        status, headers, _ = await proxy.post(body)
        assert (status, headers["x-guard-action"]) == (200, "redact")
        expected = json.loads(json.dumps(CONVERSATION))
        for (message, part), gone in changed.items():
            if part is None:
                expected[message]["content"] = gone
            else:
                expected[message]["content"][part]["text"] = gone
        if selector == "new_tool_results":
            # An id may say something, too; call and result are still joined.
            expected[2]["tool_calls"][0]["id"] = expected[3]["tool_call_id"] = sha256(b"a").hexdigest()[:9]
        assert engine.bodies[1]["messages"] == expected
        assert engine.bodies[0]["messages"] == CONVERSATION


async def test_text_of_a_prompt_is_judged_before_the_engine_gets_it(start_proxy: StartProxy) -> None:
    text = """\
version: 1
name: test
detectors:
  text: {kind: words, scope: tool}
rules:
  - {name: leak, when: {detector: text, at_least: 0.5}, action: block}
"""
    async with running(FakeEngine()) as engine, start_proxy(engine, text) as proxy:
        bad = [*CONVERSATION[:3], {"role": "tool", "content": "a secret", "tool_call_id": "a"}]
        assert (await proxy.post({**BODY, "messages": bad}))[0] == 400
        assert not engine.bodies
        elsewhere = [{"role": "user", "content": "a secret"}]
        assert (await proxy.post({**BODY, "messages": elsewhere}))[0] == 200
        first, second = await proxy.entries(2)
        assert first["scores"] == {"text": 1.0}
        assert second["detectors"]["text"].startswith("not_applicable")


@both
async def test_redact_takes_what_was_found_out_of_the_answer(start_proxy: StartProxy, stream: bool) -> None:
    async with running(FakeEngine(scripts=[LEAK])) as engine, start_proxy(engine, REDACT) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, text_of(body, stream)) == (200, "The code is [X] [X] ok and more.")
        assert (await proxy.entry())["action"] == "redact"


async def test_redact_works_in_every_field_and_every_choice_with_logprobs_gone(start_proxy: StartProxy) -> None:
    call = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a":"'}}]}
    more = {"tool_calls": [{"index": 0, "function": {"arguments": 'secret"}'}}]}
    logprobs = {"content": [{"token": "sec", "logprob": -1.0, "bytes": None, "top_logprobs": []}]}
    parts = [
        chunk(0, {"content": "ok "}), chunk(1, {"reasoning": "sec"}, logprobs=logprobs),
        chunk(1, {"reasoning": "ret!"}), chunk(0, call), chunk(0, more),
        chunk(0, {}, "tool_calls"), chunk(1, {}, "stop"), DONE,
    ]  # fmt: skip
    async with running(FakeEngine(frames=parts)) as engine, start_proxy(engine, REDACT) as proxy:
        raw = (await proxy.post({**STREAM, "n": 2}))[2]
        found = chunks(raw)
        assert b"sec" not in raw
        assert b"ret" not in raw
        deltas = [choice["delta"] for one in found for choice in one["choices"]]
        assert "".join(d.get("reasoning") or "" for d in deltas) == "[X]!"
        arguments = [c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", ())]
        assert "".join(arguments) == '{"a":"[X]"}'
        whole = {
            "id": "c", "object": "chat.completion", "created": 1, "model": "tiny", "usage": {},
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"},
                {"index": 1, "message": {"role": "assistant", "content": "12345"}, "finish_reason": "stop",
                 "logprobs": logprobs},
            ],
        }  # fmt: skip
        engine.frames, engine.body = None, json.dumps(whole).encode()
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused")
        answer = await client.chat.completions.create(**BODY, n=2)
        assert [c.message.content for c in answer.choices] == ["fine", "[X]"]
        assert answer.choices[1].logprobs is None


async def test_redaction_without_a_place_takes_all_of_the_text(start_proxy: StartProxy) -> None:
    text = REDACT.replace("{detector: text, at_least: 0.5}", "{detector: danger, at_least: 0.5}")
    async with running(FakeEngine(logit=FLAGGED)) as engine, start_proxy(engine, text) as proxy:
        assert said(chunks((await proxy.post(STREAM))[2])) == "[X]"
        assert text_of((await proxy.post(BODY))[2], False) == "[X]"


async def test_an_answer_that_was_steered_is_judged_too(start_proxy: StartProxy) -> None:
    text = POLICY + DRIFTING[DRIFTING.index("  - name: drifted") :].replace(", {detector: danger, below: 0.9}", "")
    text = text.replace("  danger: {kind: probe}\n", "  danger: {kind: probe}\n  drift: {kind: drift}\n")
    engine = FakeEngine(logit=STEERED, final_logits=[0.0, 3.0])
    async with running(engine), start_proxy(engine, text) as proxy:
        status, headers, _ = await proxy.post(BODY)
        assert (status, headers["x-guard-rules"]) == (400, "calm,watch,drifted")
        assert engine.specs[1] is not None
        assert set(engine.specs[1]) == {"hidden", "steer"}


async def test_a_shadow_policys_rules_for_answers_are_recorded_alone(start_proxy: StartProxy, tmp_path: Any) -> None:
    path = tmp_path / "p"
    path.mkdir()
    (path / "a.yaml").write_text("{version: 1, name: live}")
    (path / "b.yaml").write_text(policy("hold").replace("name: test", "name: candidate"))
    (path / "selection.yaml").write_text("{version: 1, default: live, shadow: candidate}")
    async with running(FakeEngine(scripts=[LEAK], logit=CLEAN)) as engine, start_proxy(engine, path=path) as proxy:
        status, _, body = await proxy.post(STREAM)
        assert (status, body) == (200, b"".join(map(engine.frame, LEAK)) + DONE)
        entry = await proxy.entry()
        assert (entry["action"], entry["answer"]["action"], entry["answer"]["would"]) == ("allow", "allow", "block")
        beside = entry["answer"]["shadow"]
        assert (beside["rule"], beside["scores"], beside["measured"].keys()) == ("leak", {"text": 1.0}, {"text"})
        metrics = (await proxy.get("/metrics"))[2]
        assert b'guard_rule_hits_total{action="block",mode="shadow",policy="candidate",rule="leak"} 1.0' in metrics
        would = b'guard_shadow_decisions_total{action="allow",policy="live",shadow="candidate",would="block"} 1.0'
        assert would in metrics
        # What it saw is enough to try it on the ledger before it is live.
        done = CliRunner().invoke(
            app, ["policy", "replay", str(path / "b.yaml"), "--ledger", str(proxy.ledger), "--json"]
        )
        assert json.loads(done.output)["changes"][0]["after"] == "block"
