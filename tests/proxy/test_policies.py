"""Which policy judges, which is beside it, and what happens while requests run and the files change."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from guard.proxy.keys import NewKey, create_key
from tests.policy.test_policy_set import configmap
from tests.proxy.conftest import BLOCKED, BODY, CLEAN, FLAGGED, POLICY, STEERED, Proxy, StartProxy, eventually
from tests.proxy.engine import FakeEngine, running

STREAM = {**BODY, "stream": True}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
LAX = "version: 1\nname: lax\n"
CANDIDATE = POLICY.replace("name: test", "name: candidate").replace("at_least: 0.5", "at_least: 0.001")


def folder(path: Path, selection: str, **policies: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in policies.items():
        (path / f"{name}.yaml").write_text(text)
    (path / "selection.yaml").write_text("version: 1\n" + selection)
    return path


ASSIGNED = "default: test\nassignments:\n  - {name: some, policy: lax, match: {%s}}\n"


@pytest.mark.parametrize(
    ("match", "fits", "other"),
    [
        ("models: ['ti*']", {}, {"model": "big"}),
        ("headers: {x-profile: [lax]}", {"x-profile": "lax"}, {"x-profile": "Lax"}),
        ("routes: [/v1/chat/completions]", {}, None),
    ],
)
async def test_an_assignment_chooses_the_policy_for_its_requests_and_no_others(
    start_proxy: StartProxy, tmp_path: Path, match: str, fits: dict[str, str], other: dict[str, str] | None
) -> None:
    path = folder(tmp_path / "p", ASSIGNED % match, test=POLICY, lax=LAX)
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, path=path) as proxy:
        status, headers, _ = await proxy.post(BODY, fits)
        assert (status, headers["x-guard-policy"].split("@")[0]) == (200, "lax")
        if other is not None:
            body = {**BODY, **other} if "model" in other else BODY
            status, headers, _ = await proxy.post(body, {} if "model" in other else other)
            assert (status, headers["x-guard-policy"].split("@")[0]) == (400, "test")
            assert [(e["policy"], e["assignment"]) for e in (await proxy.entries(2))[-2:]] == [
                ("lax", "some"),
                ("test", None),
            ]


async def test_two_headers_that_choose_a_policy_choose_none(start_proxy: StartProxy, tmp_path: Path) -> None:
    path = folder(tmp_path / "p", ASSIGNED % "headers: {x-profile: [lax]}", test=POLICY, lax=LAX)
    twice = [("x-profile", "lax"), ("x-profile", "other"), ("x-free", "a"), ("x-free", "b")]
    async with (
        running(FakeEngine(logit=BLOCKED)) as engine,
        start_proxy(engine, path=path) as proxy,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{proxy.url}/v1/chat/completions", json=BODY, headers=twice) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, "x-profile")
            assert "x-guard-policy" not in answer.headers
        async with session.post(f"{proxy.url}/v1/chat/completions", json=BODY, headers=twice[2:]) as answer:
            assert answer.headers["x-guard-policy"].startswith("test@")


async def test_a_policy_that_judged_nothing_is_not_named(start_proxy: StartProxy, tmp_path: Path) -> None:
    path, file = folder(tmp_path / "p", "default: test\nfor_keys: [lax]\n", test=POLICY, lax=LAX), tmp_path / "k.yaml"
    key, gone = (create_key(file, NewKey(policy=name))[0] for name in (None, "gone"))
    async with running(FakeEngine()) as engine, start_proxy(engine, path=path, keys=file) as proxy:
        for given, body, status in ((None, BODY, 401), (gone, BODY, 503), (key, {"x": 1}, 400)):
            sent = {} if given is None else {"authorization": f"Bearer {given}"}
            got, headers, _ = await proxy.post(body, sent)
            assert (got, "x-guard-policy" in headers) == (status, False)
        _, headers, _ = await proxy.post(BODY, {"authorization": f"Bearer {key}"})
        assert headers["x-guard-policy"].startswith("test@")


async def test_an_api_key_chooses_its_policy(start_proxy: StartProxy, tmp_path: Path) -> None:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("one", "two")}
    path = folder(tmp_path / "p", ASSIGNED % f"keys: [{keys['two']}]", test=POLICY, lax=LAX)
    hashes = tuple(keys.values())
    async with (
        running(FakeEngine(logit=BLOCKED)) as engine,
        start_proxy(engine, path=path, api_key_hashes=hashes) as proxy,
    ):
        statuses = {key: (await proxy.post(BODY, {"authorization": f"Bearer {key}"}))[0] for key in keys}
        assert statuses == {"one": 400, "two": 200}
        assert (await proxy.post(BODY, {"authorization": "Bearer three"}))[0] == 401
        assert (await proxy.entries(3))[-1]["policy"] == "test"


@both
async def test_a_shadow_policy_is_judged_beside_on_the_same_reading_and_changes_nothing(
    start_proxy: StartProxy, tmp_path: Path, stream: bool
) -> None:
    path = folder(tmp_path / "p", "default: test\nshadow: candidate\n", test=POLICY, candidate=CANDIDATE)
    async with running(FakeEngine(logit=CLEAN)) as engine, start_proxy(engine, path=path) as proxy:
        status, headers, body = await proxy.post({**BODY, "stream": stream})
        assert (status, headers["x-guard-action"]) == (200, "allow")
        assert "x-guard-rules" not in headers
        assert "candidate" not in str(headers)
        assert stream or body == engine.whole()
        assert [list(spec["hidden"]) for spec in engine.specs if spec] == [["danger.layer3"]]
        entry = await proxy.entry()
        assert (entry["action"], entry["would"], entry["hits"]) == ("allow", "allow", [])
        shadow = entry["shadow"]
        assert (shadow["policy"], shadow["action"], shadow["rule"]) == ("candidate", "flag", "watch")
        assert shadow["scores"] == entry["scores"]
        assert shadow["measured"] == entry["measured"]
        metrics = (await proxy.get("/metrics"))[2].decode()
        labels = '{action="allow",policy="test",shadow="candidate",would="flag"}'
        assert f"guard_shadow_decisions_total{labels} 1.0" in metrics
        assert 'guard_rule_hits_total{action="flag",mode="shadow",policy="candidate",rule="watch"} 1.0' in metrics


@both
async def test_what_a_shadow_alone_wants_to_read_costs_the_live_policy_nothing_when_the_engine_refuses_it(
    start_proxy: StartProxy, tmp_path: Path, stream: bool
) -> None:
    other = CANDIDATE.replace("danger: {kind: probe}", "danger: {kind: probe, scope: user}")
    path = folder(tmp_path / "p", "default: test\nshadow: candidate\n", test=POLICY, candidate=other)
    engine = FakeEngine(logit=BLOCKED, refuses_captures_of=".danger")
    async with running(engine), start_proxy(engine, path=path) as proxy:
        assert (await proxy.post({**BODY, "stream": stream}))[0] == 400
        assert [sorted(spec["hidden"]) for spec in engine.specs if spec] == [
            [".danger.layer3", "danger.layer3"],
            ["danger.layer3"],
        ]
        entry = await proxy.entry()
        assert entry["detectors"] == {"danger": "scored"}
        assert entry["shadow"]["detectors"] == {"danger": "unavailable: the engine refuses: no such layer"}
        assert all(hit["on_error"] for hit in entry["shadow"]["hits"])


async def test_a_shadow_that_reads_does_not_hold_a_live_policy_that_does_not(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    path = folder(tmp_path / "p", "default: lax\nshadow: test\n", lax=LAX, test=POLICY)
    engine = FakeEngine(event="missing", answer_delay_s=None)
    async with running(engine), start_proxy(engine, path=path) as proxy, asyncio.timeout(5):
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused")
        stream = await client.chat.completions.create(**STREAM)
        assert (await anext(stream)).choices[0].delta.content == "The"
        await stream.close()


@both
async def test_late_scores_are_for_on_timeout_and_other_missing_ones_for_on_error(
    start_proxy: StartProxy, stream: bool
) -> None:
    policy = POLICY.replace("on_error: flag", "on_error: flag\n    on_timeout: block\n    timeout_s: 0.1")
    engine = FakeEngine(event_delay_s=60)
    async with running(engine), start_proxy(engine, policy) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert (status, json.loads(body)["error"]["code"]) == (503, "guard_unavailable")
        entry = await proxy.entry()
        assert entry["timed_out"] == ["danger"]
        assert entry["detectors"]["danger"] == "unavailable: no readouts within 0.1 s"
        assert entry["timings_ms"]["verdict"] < 30_000
        engine.event_delay_s, engine.event = 0.0, "dropped"
        assert (await proxy.post({**BODY, "stream": stream}))[1]["x-guard-action"] == "flag"


REFUSING = POLICY.replace("action: block", "action: block\n    respond: refusal\n    message: Not this.")


async def test_a_refusal_is_an_answer_with_the_policys_words_for_every_choice(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(logit=BLOCKED, answer_delay_s=None)) as engine, start_proxy(engine, REFUSING) as p:
        client = openai.AsyncOpenAI(base_url=f"{p.url}/v1", api_key="unused")
        raw = await client.chat.completions.with_raw_response.create(**BODY, n=3)
        answer = raw.parse()
        assert [(c.index, c.finish_reason, c.message.content) for c in answer.choices] == [
            (i, "content_filter", "Not this.") for i in range(3)
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 0, 7)
        assert raw.headers["x-guard-action"] == "block"
        await eventually(lambda: engine.open == 0)
        assert engine.aborted == 1
        entry = await p.entry()
        assert (entry["outcome"], entry["status"], entry["tokens"]) == (
            "blocked", 200, {"prompt": 7, "completion": 0, "charged": 7},
        )  # fmt: skip


@pytest.mark.parametrize("usage", [False, True])
async def test_a_streamed_refusal_ends_as_a_stream_does(start_proxy: StartProxy, usage: bool) -> None:
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, REFUSING) as proxy:
        body = {**STREAM, "n": 2, **({"stream_options": {"include_usage": True}} if usage else {})}
        status, headers, raw = await proxy.post(body)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *frames, end, last = raw.decode().split("\n\n")
        assert (end, last) == ("data: [DONE]", "")
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        assert bool(chunks[-1].get("usage")) == usage
        client = openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key="unused")
        texts, finishes = {0: "", 1: ""}, {}
        async for chunk in await client.chat.completions.create(**body):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                finishes[choice.index] = choice.finish_reason
        assert texts == {0: "Not this.", 1: "Not this."}
        assert finishes == {0: "content_filter", 1: "content_filter"}


async def test_a_refusal_for_want_of_a_score_is_still_an_error(start_proxy: StartProxy) -> None:
    policy = REFUSING.replace("on_error: flag", "on_error: block")
    async with running(FakeEngine(event="missing")) as engine, start_proxy(engine, policy) as proxy:
        assert (await proxy.post())[0] == 503


GATED = POLICY.replace("coefficient: 2}]", "coefficient: 2, phase: decode}]\n    gate: {probe: drift, above: 1.5}")
ARMED = GATED.replace("    when: {detector: danger, at_least: 0.7, below: 0.9}\n", "")


async def test_a_gated_steering_asks_for_the_readout_that_opens_it(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(logit=STEERED)) as engine, start_proxy(engine, GATED) as proxy:
        assert (await proxy.post())[1]["x-guard-action"] == "steer"
        reading, steering = engine.specs
        assert reading is not None
        assert "steer" not in reading
        assert steering is not None
        assert steering["probes"] == {"..calm": {"probe": "drift", "positions": "generated"}}
        assert steering["steer"][0]["gate"] == {"readout": "..calm", "above": 1.5}


async def test_a_steering_that_only_its_gate_holds_back_goes_with_the_first_request(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(logit=FLAGGED)) as engine, start_proxy(engine, ARMED) as proxy:
        assert (await proxy.post())[1]["x-guard-action"] == "flag"
        (spec,) = engine.specs
        assert spec is not None
        assert set(spec) == {"hidden", "probes", "steer"}
        assert (await proxy.entry())["armed"] == ["calm"]


@pytest.mark.parametrize("text", [GATED, ARMED], ids=["with a condition", "without"])
@both
async def test_a_gate_that_opens_in_the_engine_is_in_the_ledger(
    start_proxy: StartProxy, text: str, stream: bool
) -> None:
    engine = FakeEngine(logit=STEERED, gates_open_at=(None, 31, 12))
    async with running(engine), start_proxy(engine, text) as proxy:
        status, _, raw = await proxy.post({**BODY, "n": 3, "stream": stream})
        assert status == 200
        assert b"mia" not in raw
        engine.gates_open_at = (None,)
        await proxy.post({**BODY, "stream": stream})
        engine.gates_open_at = ()
        await proxy.post({**BODY, "stream": stream})
        some, none, untold = [entry["gates"] for entry in await proxy.entries(3)]
    assert some == {"calm": {"choices": 3, "opened": 2, "first_at": 12, "reason": ""}}
    assert none == {"calm": {"choices": 1, "opened": 0, "first_at": None, "reason": ""}}
    assert untold == {}


async def test_a_detector_is_measured_only_where_its_scope_has_a_message(start_proxy: StartProxy) -> None:
    policy = POLICY.replace("danger: {kind: probe}", "danger: {kind: probe, scope: new_tool_results}")
    policy = policy.replace("on_error: flag", "on_error: block")
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine, policy) as proxy:
        assert (await proxy.post())[0] == 200
        assert engine.specs == [None]
        tool = {**BODY, "messages": [*BODY["messages"], {"role": "assistant"}, {"role": "tool", "content": "x"}]}
        assert (await proxy.post(tool))[0] == 400
        first, second = await proxy.entries(2)
        assert first["detectors"] == {"danger": "not_applicable: the request has no message in its scope"}
        assert (first["action"], second["detectors"]["danger"]) == ("allow", "scored")
        metrics = (await proxy.get("/metrics"))[2]
        assert b'guard_detector_results_total{detector="danger",kind="probe",status="not_applicable"} 1.0' in metrics


async def version(proxy: Proxy) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((await proxy.get("/readyz"))[2])
    return state


async def test_a_change_of_the_file_judges_the_next_request_and_is_told_everywhere(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine) as proxy:
        await asyncio.sleep(0.2)
        assert (await proxy.post())[0] == 400
        before = await version(proxy)
        changed = POLICY.replace("name: test", "name: calmer").replace("action: block", "action: flag")
        (tmp_path / "policy.yaml").write_text(changed)
        await _until(proxy, lambda now: now["policy"].startswith("calmer@"))
        after = await version(proxy)
        assert after["policies_version"] != before["policies_version"]
        assert after["policies_reload"] == "ok"
        status, headers, _ = await proxy.post()
        assert (status, headers["x-guard-policy"], headers["x-guard-rules"]) == (200, after["policy"], "stop,watch")
        old, new = await proxy.entries(2)
        assert (old["policy"], new["policy"]) == ("test", "calmer")
        metrics = (await proxy.get("/metrics"))[2].decode()
        assert f'guard_policy_info{{hash="{new["policy_hash"]}",policy="calmer"}} 1.0' in metrics
        assert 'policy="test"} 1.0' not in "".join(line for line in metrics.splitlines() if "guard_policy_info" in line)
        assert 'guard_policy_reloads_total{result="success"} 1.0' in metrics


async def test_a_broken_file_leaves_the_old_policy_in_force_and_is_told(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    async with running(FakeEngine(logit=BLOCKED)) as engine, start_proxy(engine) as proxy:
        await asyncio.sleep(0.2)
        before = await version(proxy)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("action: block", "action: redact"))
        await _until(proxy, lambda now: now["policies_reload"] == "failed")
        after = await version(proxy)
        assert after["policy"] == before["policy"]
        assert str(tmp_path) not in str(after)
        assert (await proxy.post())[0] == 400
        assert b'guard_policy_reloads_total{result="failure"}' in (await proxy.get("/metrics"))[2]


async def test_requests_that_race_a_reload_are_each_judged_by_one_whole_version(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """Every version blocks, each with words of its own; no answer mixes a hash with another version's words."""

    def texts(i: int) -> dict[str, str]:
        return {"policy.yaml": POLICY.replace("action: block", f"action: block\n    message: Version {i}.")}

    path = tmp_path / "mounted"
    configmap(path, "v0", texts(0))
    seen: dict[str, set[str]] = {}
    engine = FakeEngine(logit=BLOCKED, event_delay_s=0.02)
    async with running(engine), start_proxy(engine, path=path) as proxy:
        await asyncio.sleep(0.2)

        async def client() -> None:
            for _ in range(25):
                status, headers, body = await proxy.post()
                assert status == 400
                message = json.loads(body)["error"]["message"]
                seen.setdefault(headers["x-guard-policy"], set()).add(message)

        clients = [asyncio.create_task(client()) for _ in range(4)]
        for i in range(1, 6):
            await asyncio.sleep(0.15)
            configmap(path, f"v{i}", texts(i))
        await asyncio.gather(*clients)
        entries = await proxy.entries(100)
    assert len(seen) > 1
    assert all(len(messages) == 1 for messages in seen.values())
    assert {entry["outcome"] for entry in entries} == {"blocked"}


async def _until(proxy: Proxy, condition: Any) -> None:
    async with asyncio.timeout(8):
        while not condition(await version(proxy)):
            await asyncio.sleep(0.02)
