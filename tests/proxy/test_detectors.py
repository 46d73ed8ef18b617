"""Detectors that need more than one look at the prompt, through the proxy: of an answer while it grows, by a second
pass, and from other detectors' scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detectors.science_prompt import PROMPT_SHA256, SYSTEM
from guard.policy import PolicyError
from tests.detectors.weights import write
from tests.proxy.conftest import BODY, StartProxy
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_endpoints import RESPONSES, streams
from tests.proxy.test_streaming import chunks, said

STREAM = {**BODY, "stream": True}
ONE = np.ones(1, np.float32)
TRUE, MADE_UP = -5.0, 5.0
"""States of tokens."""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    configs = tmp_path / "model_configs"
    none = {"mean": ONE * 0, "scale": ONE, "node_indices": np.zeros(0, np.int64), "node_baselines": ONE[:0]}
    h_node = {"weight": ONE, "bias": ONE * 0, **none}
    write(configs / "h_node", "h_node", h_node, layer=3, hidden_size=1, nodes=0)
    # A state above zero is normed to 1 and is entailment; one below is contradiction.
    science = {"weight": np.array([[4], [-4], [0]], np.float32), "bias": np.zeros(3, np.float32), "norm_gain": ONE}
    fitted_to = {"norm_eps": 1e-9, "prompt_sha256": PROMPT_SHA256}
    write(configs / "science_hallucination", "science", science, layer=3, hidden_size=1, **fitted_to)
    inputs = {"probe": {"weight": 1.0}, "science_hallucination": {"weight": 1.0}}
    write(configs / "combination", "combination", inputs=inputs, bias=0.0)


def growing(contract: str, window: int = 8, on_error: str = "block") -> str:
    return f"""\
version: 1
name: test
streaming: {contract}
window_tokens: {window}
detectors: {{made_up: {{kind: h_node}}}}
rules:
  - name: made-up
    stage: stream
    when: {{detector: made_up, at_least: 0.9}}
    action: block
    on_error: {on_error}
"""


async def test_an_answer_is_cut_at_the_token_whose_state_says_that_it_is_made_up(start_proxy: StartProxy) -> None:
    words = tuple(f" w{i}" for i in range(20))
    engine = FakeEngine(scripts=[words], progress=[TRUE] * 11 + [MADE_UP] * 9)
    async with running(engine), start_proxy(engine, growing("window")) as proxy:
        status, _, body = await proxy.post(STREAM)
        assert status == 200
        text = said(chunks(body))
        # The 12th word is the first that is known to be bad, and what leaves is 8 behind.
        assert "w0" in text
        assert "w11" not in text
        assert chunks(body)[-1]["choices"][0]["finish_reason"] == "content_filter"
        assert engine.specs[0] is not None
        assert engine.specs[0]["progress_tokens"] == 2
        answer = (await proxy.entry())["answer"]
        assert (answer["rule"], answer["scores"]["made_up"]) == ("made-up", pytest.approx(0.9933, abs=1e-4))


async def test_readouts_of_an_answer_tell_its_prompts_tokens_where_its_stream_does_not(start_proxy: StartProxy) -> None:
    engine = FakeEngine(event="missing", word_delay_s=0.01)
    begun, *rest = streams(RESPONSES, tuple(f" w{i}" for i in range(20)))
    true, made_up = engine.grown("progress", 0, [TRUE] * 6), engine.grown("progress", 6, [MADE_UP])
    engine.frames = [begun, *rest[:7], true, *rest[7:13], made_up, *rest[13:]]
    async with running(engine), start_proxy(engine, growing("window")) as proxy:
        _, _, raw = await proxy.post({"model": "tiny", "input": "Hi", "stream": True}, path=RESPONSES)
        (end,) = (json.loads(one.split(b"data: ")[1]) for one in raw.split(b"\n\n") if b"response.incomplete" in one)
        assert end["response"]["usage"]["input_tokens"] == 7
        assert (await proxy.entry())["tokens"]["prompt"] == 7


async def test_a_true_answer_passes_whole_though_nothing_is_known_of_its_first_tokens(start_proxy: StartProxy) -> None:
    words = tuple(f" w{i}" for i in range(20))
    engine = FakeEngine(scripts=[words], progress=[TRUE] * 20)
    async with running(engine), start_proxy(engine, growing("window")) as proxy:
        status, _, body = await proxy.post(STREAM)
        assert (status, said(chunks(body))) == (200, "".join(words))
        assert (await proxy.entry())["answer"]["action"] == "allow"


SCORED = """\
version: 1
name: test
streaming: window
window_tokens: 4
detectors: {made_up: {kind: h_node}}
rules:
  - {name: made-up, stage: stream, when: {detector: made_up, BOUND}, action: flag}
  - {name: low, stage: stream, when: {detector: made_up, below: 0.001}, action: flag}
"""


@pytest.mark.parametrize("bound", ["at_least: 0.5", "at_least: 0.99999"])
async def test_a_streams_recorded_score_is_the_highest_of_all_times_wherever_it_is_told(
    start_proxy: StartProxy, bound: str
) -> None:
    """Whether a rule hit on it or not; not that of the first time, at which there was nothing to score."""
    words = tuple(f" w{i}" for i in range(20))
    engine = FakeEngine(scripts=[words], progress=[None, TRUE, *[MADE_UP] * 8, *[TRUE] * 10], word_delay_s=0.01)
    highest = pytest.approx(0.9933, abs=1e-4)
    async with running(engine), start_proxy(engine, SCORED.replace("BOUND", bound)) as proxy:
        await proxy.post(STREAM)
        answer = (await proxy.entry())["answer"]
        assert (answer["scores"]["made_up"], answer["detectors"]["made_up"]) == (highest, "scored")
        assert (answer["complete"], answer["earlier"]) == (True, [])
        assert answer["action"] == ("flag" if bound.endswith(" 0.5") else "allow")
        over_time = answer["over_time"]["made_up"]
        assert over_time["highest"] == highest
        assert over_time["without"] == ["not_applicable: the engine has sent nothing of the answer yet"]
        metrics = (await proxy.get("/metrics"))[2].decode()
        assert 'guard_detector_results_total{detector="made_up",kind="h_node",status="scored"} 1.0' in metrics
        assert 'guard_detector_score_sum{detector="made_up",kind="h_node"} 0.99' in metrics


@pytest.mark.parametrize("known", [0, 3])
async def test_an_engine_that_falls_behind_its_answer_is_no_clean_answer(start_proxy: StartProxy, known: int) -> None:
    words = tuple(f" w{i}" for i in range(20))
    engine = FakeEngine(scripts=[words], progress=[TRUE] * known, word_delay_s=0.01)
    async with running(engine), start_proxy(engine, growing("window")) as proxy:
        status, _, body = await proxy.post(STREAM)
        # Before the first word has left it is a status; afterwards it is the stream's last frame.
        assert b"guard_unavailable" in body
        assert b"w12" not in body
        entry = await proxy.entry()
        assert "far behind the answer" in entry["answer"]["detectors"]["made_up"]
        assert entry["outcome"] == "guard_unavailable"
        assert status in (200, 503)


async def test_a_whole_answer_is_judged_by_the_same_rule(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, growing("hold", on_error="flag")) as proxy:
        status, headers, _ = await proxy.post(BODY)
        assert (status, headers["x-guard-rules"]) == (200, "made-up"), "there are no readouts, which is no clean score"


CHECKED = """\
version: 1
name: test
detectors:
  facts: {kind: science_hallucination, config: science.json, scope: tool_results}
rules:
  - name: unsupported
    stage: output
    when: {detector: facts, at_least: 0.5}
    action: block
    on_error: flag
    on_timeout: block
    timeout_s: 0.4
"""
FOUND = {"role": "tool", "content": "the reference", "tool_call_id": "1"}
ASKED = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "", "tool_calls": []}, FOUND]}
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def checked(tmp_path: Path) -> str:
    folder = tmp_path / "model_configs" / "science_hallucination"
    (folder / "science.json").write_text((folder / "tiny.json").read_text())
    return CHECKED.replace("science.json", f"{folder}/science.json")


@both
async def test_an_answer_that_its_reference_contradicts_is_blocked(
    start_proxy: StartProxy, checked: str, stream: bool
) -> None:
    engine = FakeEngine(pass_state=-1.0)
    async with running(engine), start_proxy(engine, checked) as proxy:
        status, headers, body = await proxy.post({**ASKED, "stream": stream})
        assert (status, headers["x-guard-rules"]) == (400, "unsupported")
        assert json.loads(body)["error"]["code"] == "content_filter"
        (asked,) = engine.passes
        assert (asked["model"], asked["max_tokens"]) == ("tiny", 1)
        assert asked["messages"][0]["content"] == SYSTEM
        assert asked["messages"][-1]["content"] == "Reference: the reference\nClaim: The answer is 42."
        assert json.loads(asked["vllm_xargs"]["mia"]) == {"hidden": {"state": {"layer": 3}}}
        answer = (await proxy.entry())["answer"]
        assert answer["details"]["facts"]["contradiction"] == pytest.approx(0.98, abs=0.01)
        assert answer["second_pass_ms"] > 0
        assert "reference" not in (proxy.ledger.read_text())


@both
async def test_an_answer_that_its_reference_supports_passes(
    start_proxy: StartProxy, checked: str, stream: bool
) -> None:
    engine = FakeEngine(pass_state=1.0)
    async with running(engine), start_proxy(engine, checked) as proxy:
        status, _, body = await proxy.post({**ASKED, "stream": stream})
        assert status == 200
        assert b"42" in body
        assert len(engine.passes) == 1


async def test_without_a_reference_in_scope_no_second_pass_is_made(start_proxy: StartProxy, checked: str) -> None:
    engine = FakeEngine(pass_state=-1.0)
    async with running(engine), start_proxy(engine, checked) as proxy:
        assert (await proxy.post(BODY))[0] == 200
        assert not engine.passes
        assert (await proxy.entry())["answer"]["detectors"]["facts"].startswith("not_applicable")


async def test_a_refused_second_pass_is_a_missing_score_and_its_text_goes_nowhere(
    start_proxy: StartProxy, checked: str
) -> None:
    engine = FakeEngine(pass_state=None)
    async with running(engine), start_proxy(engine, checked) as proxy:
        status, headers, _ = await proxy.post(ASKED)
        assert (status, headers["x-guard-rules"]) == (200, "unsupported")
        entry = (await proxy.entry())["answer"]
        assert entry["detectors"]["facts"] == "unavailable: the model server answers the second pass with 400 (400)"


async def test_a_second_pass_that_takes_too_long_is_what_on_timeout_says(start_proxy: StartProxy, checked: str) -> None:
    engine = FakeEngine(pass_state=1.0, pass_delay_s=5)
    async with running(engine), start_proxy(engine, checked) as proxy:
        status, _, body = await proxy.post(ASKED)
        assert (status, json.loads(body)["error"]["code"]) == (503, "guard_unavailable")
        assert (await proxy.entry())["answer"]["timed_out"] == ["facts"]


COMBINED = """\
version: 1
name: test
detectors:
  danger: {kind: probe}
  facts: {kind: science_hallucination}
  all: {kind: combination, inputs: {probe: danger, science_hallucination: facts}}
rules:
  - {name: together, stage: output, when: {detector: all, at_least: 0.5}, action: flag, on_error: block}
"""


@pytest.mark.parametrize(("logit", "state", "flagged"), [(-5.0, -1.0, True), (-9.0, -1.0, False), (5.0, 1.0, True)])
async def test_scores_are_combined_where_all_of_them_are_known(
    start_proxy: StartProxy, logit: float, state: float, flagged: bool
) -> None:
    engine = FakeEngine(logit=logit, pass_state=state)
    async with running(engine), start_proxy(engine, COMBINED) as proxy:
        status, headers, _ = await proxy.post(ASKED)
        assert status == 200
        assert (headers.get("x-guard-rules") == "together") is flagged
        scores = (await proxy.entry())["answer"]["scores"]
        assert scores.keys() == {"danger", "facts", "all"}


async def test_a_combination_without_one_of_its_scores_is_no_score(start_proxy: StartProxy) -> None:
    async with running(FakeEngine(pass_state=None)) as engine, start_proxy(engine, COMBINED) as proxy:
        status, _, body = await proxy.post(ASKED)
        assert (status, json.loads(body)["error"]["code"]) == (503, "guard_unavailable")


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (changed(COMBINED, "science_hallucination: facts}", "}"), "the inputs of a combination are: probe, science"),
        (changed(COMBINED, "probe: danger,", "probe: facts,"), "probe is to be the score of a probe, and facts is"),
        (changed(COMBINED, "probe: danger,", "probe: nobody,"), "takes the scores of nobody, which are not defined"),
        (changed(COMBINED, "probe: danger,", "probe: all,"), "which is itself a combination"),
        (
            changed(
                COMBINED,
                "facts: {kind: science_hallucination}",
                "facts: {kind: science_hallucination}\n  x: {kind: probe, inputs: {a: danger}}",
            ),
            "inputs of a probe are: none",
        ),
        (changed(COMBINED, "stage: output", "stage: stream"), "facts has the model read the answer once more"),
        (changed(growing("window"), "stage: stream", "stage: prompt"), "of which a prompt has none: stage stream"),
    ],
)
async def test_a_policy_whose_detectors_do_not_fit_is_refused_with_the_field(
    start_proxy: StartProxy, policy: str, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        async with start_proxy(FakeEngine(url="http://127.0.0.1:1"), policy):
            raise AssertionError("it started")


def test_the_second_pass_is_of_the_words_alone(tmp_path: Path) -> None:
    from guard.proxy.wire_choices import chat_form, completions_form
    from guard.proxy.wire_messages import messages_form
    from guard.proxy.wire_responses import responses_form

    def spoken(form: Any, answer: Any) -> list[str]:
        return [piece.text for piece in form.pieces(answer) if form.words(piece.channel)]

    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"content": "said", "reasoning": "thought", "tool_calls": [call]}
    assert spoken(chat_form, {"choices": [{"index": 0, "message": message}]}) == ["said"]
    assert spoken(completions_form, {"choices": [{"index": 0, "text": "said"}]}) == ["said"]
    blocks = [{"type": "thinking", "thinking": "thought"}, {"type": "text", "text": "said"}]
    assert spoken(messages_form, {"content": [*blocks, {"type": "tool_use", "name": "f", "input": {}}]}) == ["said"]
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "said"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
    ]
    assert spoken(responses_form, {"object": "response", "output": output}) == ["said"]
