"""The aperture over HTTP, on the real model: readouts beside the answer in its three forms, errors, steering."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from guard.mia.results import AttentionReadout, HiddenReadout, Readouts, RowsReadout

pytestmark = pytest.mark.engine

MODEL = "smollm2-135m"
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]


@dataclass(frozen=True)
class Engine:
    url: str
    taps: dict[str, Any]

    @property
    def reading(self) -> dict[str, Any]:
        """A spec that reads one tap of each kind."""
        return {
            "spans": {"instruction": "system", "data": "user.last"},
            "hidden": {"h": {"layer": self.taps["hidden_layers"][0]}},
            "attention": {"a": {"heads": self.taps["attention_heads"][:3], "spans": ["instruction", "data"]}},
        }

    @property
    def steering(self) -> dict[str, Any]:
        layer, vector = self.taps["steering_layers"][0], self.taps["steering_vectors"][0]
        return {"steer": [{"vector": vector, "layer": layer, "coefficient": 8.0}]}

    async def post(
        self, body: dict[str, Any], headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
    ) -> tuple[int, Any, bytes]:
        url = f"{self.url}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()


def body(spec: Any = None, **more: Any) -> dict[str, Any]:
    asked = {"vllm_xargs": {"mia": spec if isinstance(spec, str) else json.dumps(spec)}} if spec is not None else {}
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0, **asked, **more}


@pytest.fixture
async def engine(engine_url: str) -> Engine:
    async with aiohttp.ClientSession() as session, session.get(f"{engine_url}/v1/mia/capabilities") as answer:
        return Engine(engine_url, (await answer.json())["taps"])


def one(event: dict[str, Any]) -> Readouts:
    assert event["object"] == "mia.readouts"
    (wire,) = event["readouts"]
    return Readouts.from_wire(wire)


def assert_same(a: Readouts, b: Readouts) -> None:
    assert (a.span_tokens, a.prompt_tokens) == (b.span_tokens, b.prompt_tokens)
    for name, item in a.items.items():
        other = b.items[name]
        assert (item.status, other.status) == ("complete", "complete")
        if isinstance(item, HiddenReadout) and isinstance(other, HiddenReadout):
            np.testing.assert_allclose(item.values, other.values, rtol=1e-3, atol=1e-3)
        if isinstance(item, AttentionReadout) and isinstance(other, AttentionReadout):
            for span, mass in item.mass.items():
                np.testing.assert_allclose(mass, other.mass[span], atol=1e-4)


async def test_readouts_are_the_same_in_all_three_forms_and_the_answer_is_untouched(engine: Engine) -> None:
    _, _, plain = await engine.post(body())
    _, _, in_json = await engine.post(body(engine.reading))
    status, headers, early = await engine.post(body(engine.reading), {"x-mia-early": "1"})
    _, _, streamed = await engine.post(body(engine.reading, stream=True))

    first, rest = early.split(b"\n", 1)
    envelope, original = rest.split(b"\n", 1)
    assert (status, headers["x-mia-early"]) == (200, "1")
    assert json.loads(envelope)["status"] == 200
    frames = [json.loads(f.removeprefix(b"data: ")) for f in streamed.split(b"\n\n") if f.startswith(b"data: {")]

    answer = json.loads(in_json)
    readouts = one(answer.pop("mia"))
    assert_same(readouts, one(json.loads(first)))
    assert_same(readouts, one(frames[0]))
    expected = json.loads(plain)["choices"]
    assert answer["choices"] == expected
    assert json.loads(original)["choices"] == expected
    text = "".join(c["delta"].get("content") or "" for f in frames[1:] for c in f["choices"])
    assert text == expected[0]["message"]["content"]
    assert streamed.rstrip().endswith(b"data: [DONE]")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"instructions": MESSAGES[0]["content"], "input": MESSAGES[1]["content"]}),
        ("/v1/messages", {"system": MESSAGES[0]["content"], "messages": MESSAGES[1:], "max_tokens": 12}),
    ],
)
async def test_spans_of_messages_are_found_whichever_api_they_come_through(
    engine: Engine, path: str, asked: dict[str, Any]
) -> None:
    spec = {"vllm_xargs": {"mia": json.dumps(engine.reading)}}
    status, _, raw = await engine.post({"model": MODEL, "temperature": 0, **asked, **spec}, path=path)
    _, _, as_chat = await engine.post(body(engine.reading))
    assert status == 200, raw
    assert_same(one(json.loads(raw)["mia"]), one(json.loads(as_chat)["mia"]))


async def test_every_choice_and_only_requests_that_ask_have_readouts(engine: Engine) -> None:
    _, _, several = await engine.post(body(engine.reading, n=3, temperature=1.0, seed=1))
    assert sorted(wire["choice_index"] for wire in json.loads(several)["mia"]["readouts"]) == [0, 1, 2]
    _, _, nothing = await engine.post(body())
    assert "mia" not in json.loads(nothing)


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        ("not json", "vllm_xargs.mia"),
        ({"hiden": {}}, "vllm_xargs.mia.hiden"),
        ({"hidden": {"h": {"layer": 999}}}, "vllm_xargs.mia.hidden.h.layer"),
        (
            {"attention": {"a": {"heads": [[1, 999]], "spans": ["x"]}}, "spans": {"x": "user"}},
            "vllm_xargs.mia.attention.a.heads",
        ),
        ({"steer": [{"vector": "no-such", "layer": 1, "coefficient": 1}]}, "vllm_xargs.mia.steer"),
    ],
)  # fmt: skip
async def test_a_bad_spec_is_a_400_that_names_its_field_and_the_engine_lives(
    engine: Engine, spec: Any, param: str
) -> None:
    for stream in (False, True):
        status, _, raw = await engine.post(body(spec, stream=stream))
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (400, "invalid_mia_spec")
        assert error["param"].startswith(param)
    assert (await engine.post(body()))[0] == 200


async def test_a_request_that_vllm_refuses_is_refused_as_always(engine: Engine) -> None:
    status, headers, raw = await engine.post(body(engine.reading, max_tokens=10**6), {"x-mia-early": "1"})
    assert status == 400
    assert "x-mia-early" not in headers
    assert json.loads(raw)["error"]["code"] == 400


async def test_a_spec_spelt_so_that_it_slips_past_the_check_is_refused(engine: Engine) -> None:
    raw = json.dumps(body(engine.reading)).replace("vllm_xargs", "vllm\\u005fxargs")
    url, headers = f"{engine.url}/v1/chat/completions", {"content-type": "application/json"}
    async with aiohttp.ClientSession() as session, session.post(url, data=raw, headers=headers) as answer:
        assert answer.status == 400


async def test_every_prompt_of_a_completion_request_has_its_own_readouts(engine: Engine) -> None:
    head = engine.taps["attention_heads"][0]
    spec = {"spans": {"first": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [head], "spans": ["first"]}}}
    asked = {
        key: value for key, value in body(spec, prompt=["One two", "A much longer prompt"]).items() if key != "messages"
    }
    status, _, raw = await engine.post(asked, path="/v1/completions")
    wires = sorted(json.loads(raw)["mia"]["readouts"], key=lambda wire: wire["prompt_index"])
    assert status == 200
    assert [wire["prompt_index"] for wire in wires] == [0, 1]
    assert wires[0]["prompt_tokens"] < wires[1]["prompt_tokens"]
    assert {Readouts.from_wire(wire).items["a"].status for wire in wires} == {"complete"}


async def test_structured_output_and_logprobs_are_what_they_are_without_readouts(engine: Engine) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string", "maxLength": 8}}, "required": ["colour"]}
    constrained = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 30,
    }
    _, _, plain = await engine.post(body(**constrained))
    _, _, read = await engine.post(body(engine.reading, **constrained))
    (expected,), (got,) = (json.loads(raw)["choices"] for raw in (plain, read))
    assert "colour" in json.loads(got["message"]["content"])
    assert got["message"] == expected["message"]
    for a, b in zip(got["logprobs"]["content"], expected["logprobs"]["content"], strict=True):
        assert a["token"] == b["token"]
        assert a["logprob"] == pytest.approx(b["logprob"], abs=1e-3)


async def test_generated_rows_come_at_the_end_of_a_stream_and_match_its_tokens(engine: Engine) -> None:
    layer = engine.taps["hidden_layers"][0]
    spec = {"hidden": {"g": {"layer": layer, "positions": "generated"}}}
    _, _, raw = await engine.post(body(spec, stream=True, max_tokens=6))
    frames = [json.loads(f.removeprefix(b"data: ")) for f in raw.split(b"\n\n") if f.startswith(b"data: {")]
    prompt, final = (frame["readouts"][0] for frame in frames if frame.get("object") == "mia.readouts")
    assert (prompt["stage"], prompt["items"], final["stage"]) == ("prompt", {}, "final")
    rows = Readouts.from_wire(final).items["g"]
    assert isinstance(rows, RowsReadout)
    start = final["prompt_tokens"]
    assert rows.positions == tuple(range(start, start + len(rows.positions)))
    assert 1 <= len(rows.positions) <= 5


async def test_beam_search_which_would_lose_the_steering_is_refused(engine: Engine) -> None:
    status, _, raw = await engine.post(body(engine.steering, use_beam_search=True, n=2))
    assert status == 400
    assert "use_beam_search" in json.loads(raw)["error"]["message"]


async def test_without_a_system_message_its_readout_is_unavailable_and_the_answer_comes(engine: Engine) -> None:
    spec = {key: value for key, value in engine.reading.items() if key != "hidden"}
    for headers in ({}, {"x-mia-early": "1"}):
        status, _, raw = await engine.post(body(spec, messages=MESSAGES[1:]), headers)
        event = json.loads(raw.split(b"\n", 1)[0]) if headers else json.loads(raw)["mia"]
        assert status == 200
        item = one(event).items["a"]
        assert item.status == "unavailable"
        assert "instruction" in item.reason


def test_a_steered_request_differs_and_its_neighbours_in_the_batch_do_not(engine_url: str, engine: Engine) -> None:
    client = openai.OpenAI(base_url=f"{engine_url}/v1", api_key="none", max_retries=0)

    def ask(steered: bool) -> str:
        extra = {"vllm_xargs": {"mia": json.dumps(engine.steering)}} if steered else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, extra_body=extra
        )
        return answer.choices[0].message.content or ""

    alone, steered_alone = ask(False), ask(True)
    assert steered_alone != alone
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, [i % 2 == 0 for i in range(8)]))
    assert together == [steered_alone if i % 2 == 0 else alone for i in range(8)]
    assert ask(False) == alone
