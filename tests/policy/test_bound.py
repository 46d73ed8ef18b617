"""A policy bound to detectors asks for what they need, under names of its own, and hands each what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from detectors.base import CapturePlan, Score
from guard.mia.results import AttentionReadout, HiddenReadout, Readout, Readouts
from guard.mia.spec import AttentionCapture, Gate, HiddenCapture, parse_spec
from guard.policy import PolicyError, bind, build_detectors, load_policy
from guard.policy.judges import judges
from guard.policy.loading import digests
from guard.policy.measuring import measurement, question
from guard.policy.schema import DetectorUse

POLICY = """\
version: 1
name: test
detectors:
  one: {kind: fake}
  two: {kind: fake, spans: {data: tool}}
rules:
  - name: stop
    when: {any: [{detector: one, at_least: strict}, {detector: two, at_least: 0.9}]}
    action: block
  - name: calm
    when: {detector: one, at_least: 0.5}
    action: steer
    steer: [{vector: calm, layer: 3, coefficient: 2}]
"""


@dataclass
class Fake:
    """Scores the first element of its hidden state, and remembers what it was handed."""

    kind: str = "fake"
    thresholds: Mapping[str, float] = field(default_factory=lambda: {"strict": 0.8})
    handed: dict[str, Readout] = field(default_factory=dict)

    def plan(self) -> CapturePlan:
        return CapturePlan(
            hidden={"h": HiddenCapture(layer=3)},
            attention={"a": AttentionCapture(heads=((1, 0),), spans=("instruction", "data"))},
            spans={"instruction": ("system",), "data": ("user.last",)},
        )

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        self.handed = dict(readouts)
        hidden = readouts.get("h")
        if not isinstance(hidden, HiddenReadout) or hidden.values is None:
            return Score("unavailable", reason="nothing came back")
        return Score("scored", float(hidden.values[0]))


def load(tmp_path: Path, text: str = POLICY):
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return load_policy(path)


def readouts(one: float, two: float) -> Readouts:
    mass = np.ones(1, np.float32)
    items: dict[str, Readout] = {}
    for name, value in (("one", one), ("two", two)):
        items[f"{name}.h"] = HiddenReadout("complete", 3, 5, 6, np.full(2, value, np.float32))
        items[f"{name}.a"] = AttentionReadout(
            "complete", ((1, 0),), (5,), (), {f"{name}.instruction": mass, f"{name}.data": mass}
        )
    return Readouts(items)


def test_the_spec_is_the_union_of_what_detectors_need(tmp_path: Path) -> None:
    spec = bind(load(tmp_path), {"one": Fake(), "two": Fake()}).spec
    assert set(spec.hidden) == {"one.h", "two.h"}
    assert spec.spans["one.data"] == ("user.last",)
    assert spec.spans["two.data"] == ("tool",)
    assert spec.attention["two.a"].spans == ("two.instruction", "two.data")


def test_each_detector_gets_its_own_readouts_under_its_own_names(tmp_path: Path) -> None:
    fakes = {"one": Fake(), "two": Fake()}
    policy = bind(load(tmp_path), fakes)
    scores = policy.scores(readouts(0.25, 0.95))
    assert {name: score.value for name, score in scores.items()} == pytest.approx({"one": 0.25, "two": 0.95})
    assert set(fakes["two"].handed) == {"h", "a"}
    assert set(fakes["two"].handed["a"].mass) == {"instruction", "data"}
    assert policy.decide(scores).rule == "stop"


def test_thresholds_by_name_are_the_detectors(tmp_path: Path) -> None:
    policy = bind(load(tmp_path), {"one": Fake(), "two": Fake()})
    assert policy.decide(policy.scores(readouts(0.85, 0.1))).action == "block"
    decision = policy.decide(policy.scores(readouts(0.75, 0.1)))
    assert decision.action == "steer"
    assert policy.steered(decision).steer[0].vector == "calm"
    assert not policy.steered(decision).hidden


def test_without_readouts_every_detector_is_unavailable_with_the_reason(tmp_path: Path) -> None:
    policy = bind(load(tmp_path), {"one": Fake(), "two": Fake()})
    scores = policy.scores(None, "the engine has no taps")
    assert {(s.status, s.reason) for s in scores.values()} == {("unavailable", "the engine has no taps")}
    assert policy.scores(Readouts({}))["one"].status == "unavailable"
    assert all(hit.on_error for hit in policy.decide(scores).hits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_score_that_is_not_a_number_is_no_score(tmp_path: Path, value: float | None) -> None:
    class Odd(Fake):
        def score(self, readouts: Mapping[str, Readout]) -> Score:
            return Score("scored", value)

    assert bind(load(tmp_path), {"one": Odd(), "two": Fake()}).scores(readouts(0, 0))["one"].status == "unavailable"


@pytest.mark.parametrize(("key", "named"), [("one", "detector one"), (".one", "the shadow policy's detector one")])
def test_a_detector_that_raises_is_named_in_the_log(key: str, named: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Fake):
        def score(self, readouts: Mapping[str, Readout]) -> Score:
            raise ZeroDivisionError("private words")

    measurement(key, Broken(), DetectorUse(kind="probe")).score(readouts(0, 0.5))
    assert f"{named} failed: ZeroDivisionError" in caplog.text
    assert "private words" not in caplog.text


def test_a_detector_that_raises_gives_no_score_and_the_others_do(tmp_path: Path) -> None:
    class Broken(Fake):
        def score(self, readouts: Mapping[str, Readout]) -> Score:
            raise ZeroDivisionError("private words")

    scores = bind(load(tmp_path), {"one": Broken(), "two": Fake()}).scores(readouts(0, 0.5))
    assert scores["one"] == Score("unavailable", reason="the detector failed (ZeroDivisionError)")
    assert scores["two"].status == "scored"


@dataclass
class Grown(Fake):
    """Reads what the model computes while it answers."""

    def plan(self) -> CapturePlan:
        return CapturePlan(hidden={"h": HiddenCapture(layer=3, positions="generated")})


def test_what_is_read_of_an_answer_cannot_be_judged_with_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"rules.0.stage: one reads generated tokens.*stage stream"):
        bind(load(tmp_path), {"one": Grown(), "two": Fake()})


def test_a_rule_that_judges_a_growing_answer_has_the_engine_send_it_several_times_a_window(tmp_path: Path) -> None:
    text = (
        POLICY.replace("action: block", "action: block\n    stage: stream", 1)
        + "streaming: window\nwindow_tokens: 20\n"
    )
    text = text[: text.index("  - name: calm")] + text[text.index("streaming") :]
    policy = bind(load(tmp_path, text), {"one": Grown(), "two": Fake()})
    assert policy.progress_tokens == 5
    assert judges(policy, None).ask(("user",)).spec.progress_tokens == 5
    assert bind(load(tmp_path, text), {"one": Fake(), "two": Fake()}).progress_tokens is None


def test_an_answers_scores_are_no_part_of_the_prompts(tmp_path: Path) -> None:
    text = POLICY.replace("action: block", "action: block\n    stage: output")
    policy = bind(load(tmp_path, text), {"one": Fake(), "two": Fake()})
    assert policy.detectors_of(("prompt",)) == policy.detectors_of(("output",)) == {"one", "two"}
    text = text.replace(", spans: {data: tool}", "")
    policy = bind(load(tmp_path, text), {"one": Fake(), "two": Grown()})
    assert policy.detectors_of(("prompt",)) == {"one"}
    assert policy.detectors_of(("output",)) == {"one", "two"}
    assert policy.holds_answers


@pytest.mark.parametrize(
    ("streaming", "rule", "fits"),
    [
        ("hold", "stage: output\n    action: retry\n    steer: [{vector: calm, layer: 3, coefficient: 2}]", True),
        ("window", "stage: output\n    action: retry\n    steer: [{vector: calm, layer: 3, coefficient: 2}]", False),
        ("window", "stage: stream\n    action: redact\n    redact: {}", True),
        ("observe", "stage: stream\n    action: redact\n    redact: {}", False),
        ("window", "stage: output\n    action: redact\n    redact: {}", False),
        ("observe", "stage: output\n    action: route\n    route: {model: m}", False),
        ("observe", "stage: output\n    action: block", True),
    ],
)
def test_what_has_left_already_cannot_be_changed(tmp_path: Path, streaming: str, rule: str, fits: bool) -> None:
    text = POLICY.replace("name: test", f"name: test\nstreaming: {streaming}").replace("action: block", rule, 1)
    if fits:
        assert load(tmp_path, text).policy.streaming == streaming
        return
    with pytest.raises(PolicyError, match="comes too late with streaming"):
        load(tmp_path, text)


SCOPED = POLICY.replace("two: {kind: fake, spans: {data: tool}}", "two: {kind: fake, spans: {data: new_tool_results},\n"
                        "    scope: new_tool_results}")  # fmt: skip


def test_a_detector_asks_for_nothing_where_the_conversation_has_nothing_in_its_scope(tmp_path: Path) -> None:
    policy = bind(load(tmp_path, SCOPED), {"one": Fake(), "two": Fake()})
    asked = question(policy.measurements.values(), ("system", "user"))
    assert set(asked.spec.hidden) == {"one.h"}
    scores = asked.scores(policy.measurements, readouts(0.1, 0.95), "", False)
    assert (scores["one"].status, scores["two"].status) == ("scored", "not_applicable")
    assert policy.decide(scores).action == "allow"
    asked = question(policy.measurements.values(), ("system", "user", "assistant", "tool"))
    assert asked.spec.spans["two.data"] == ("message.3",)
    assert policy.decide(asked.scores(policy.measurements, readouts(0.1, 0.95), "", False)).action == "block"


def test_a_span_that_means_no_message_makes_its_detector_unavailable_and_not_clean(tmp_path: Path) -> None:
    text = POLICY.replace("data: tool", "data: new_tool_results")
    policy = bind(load(tmp_path, text), {"one": Fake(), "two": Fake()})
    asked = question(policy.measurements.values(), ("user",))
    scores = asked.scores(policy.measurements, readouts(0.1, 0.95), "", False)
    assert scores["two"] == Score("unavailable", reason="no message is meant by new_tool_results")
    assert policy.decide(scores).hits[0].on_error


GATED = POLICY.replace("coefficient: 2}]", "coefficient: 2, phase: decode}]\n    gate: {GATE}")


@pytest.mark.parametrize("armed", [False, True])
def test_a_gate_on_a_probe_becomes_a_gate_of_the_spec_with_the_capture_it_reads(tmp_path: Path, armed: bool) -> None:
    text = GATED.replace("{GATE}", "{probe: drift, above: 1.5}")
    if armed:
        text = text.replace("    when: {detector: one, at_least: 0.5}\n", "")
    policy = bind(load(tmp_path, text), {"one": Fake(), "two": Fake()})
    decision = policy.decide(policy.scores(readouts(0.6, 0.1)))
    assert decision.action == ("allow" if armed else "steer")
    spec = policy.steered(decision)
    ((name, capture),) = spec.probes.items()
    assert (capture.probe, capture.positions) == ("drift", "generated")
    assert spec.steer[0].gate == Gate(readout=name, above=1.5)
    assert not spec.hidden
    assert [one.rule for one in policy.armed] == (["calm"] if armed else [])


def test_a_gate_on_a_detectors_attention_reads_what_the_detector_reads(tmp_path: Path) -> None:
    text = GATED.replace("{GATE}", "{detector: two, span: instruction, below: 0.2}")
    policy = bind(load(tmp_path, text), {"one": Fake(), "two": Fake()})
    spec = policy.steered(policy.decide(policy.scores(readouts(0.6, 0.1))))
    assert spec.steer[0].gate == Gate(readout="two.a", span="two.instruction", below=0.2)
    assert spec.attention == {"two.a": policy.spec.attention["two.a"]}
    assert spec.spans["two.data"] == ("tool",)
    assert parse_spec(spec.to_wire()) == spec


def test_an_armed_steering_in_shadow_mode_is_not_sent(tmp_path: Path) -> None:
    text = GATED.replace("{GATE}", "{probe: drift, above: 1.5}").replace(
        "    when: {detector: one, at_least: 0.5}\n", "    mode: shadow\n"
    )
    assert bind(load(tmp_path, text), {"one": Fake(), "two": Fake()}).armed == ()


def test_more_vectors_than_an_engine_takes_are_refused_when_the_policy_is_loaded(tmp_path: Path) -> None:
    vectors = ", ".join(["{vector: calm, layer: 3, coefficient: 2}"] * 5)
    loaded = load(tmp_path, POLICY.replace("{vector: calm, layer: 3, coefficient: 2}", vectors))
    with pytest.raises(PolicyError, match=r"13: rules\.1\.steer: more than one request can ask for"):
        bind(loaded, {"one": Fake(), "two": Fake()})


@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("{detector: two, span: nowhere, below: 0.2}", "reads the attention on 'nowhere' 0 times"),
        ("{detector: three, span: data, below: 0.2}", "rule 'calm' uses detectors that are not defined: three"),
    ],
)
def test_a_gate_that_reads_nothing_is_refused(tmp_path: Path, gate: str, message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        bind(load(tmp_path, GATED.replace("{GATE}", gate)), {"one": Fake(), "two": Fake()})
    assert message in str(caught.value)


def test_scores_of_two_policies_compare_when_they_measure_the_same(tmp_path: Path) -> None:
    def digests(text: str) -> dict[str, str]:
        return dict(bind(load(tmp_path, text), {"one": Fake(), "two": Fake()}).digests)

    before, after = digests(POLICY), digests(POLICY.replace("data: tool", "data: user"))
    assert before["one"] == after["one"]
    assert before["two"] != after["two"]


def test_a_file_that_gets_new_thresholds_still_gives_the_same_scores(tmp_path: Path) -> None:
    text = POLICY.replace("spans: {data: tool}", "spans: {data: tool}, config: own.json")

    def digest(file: str) -> str:
        (tmp_path / "own.json").write_text(file)
        return digests(load(tmp_path, text))["two"]

    first = digest('{"params": {"layers": [1]}, "calibration": {"thresholds": {"strict": 0.5}}}')
    assert digest('{"params": {"layers": [1]}, "calibration": {"thresholds": {"strict": 0.6}}}') == first
    assert digest('{"params": {"layers": [2]}, "calibration": {"thresholds": {"strict": 0.5}}}') != first
    assert digest("not JSON") != first


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("at_least: strict", "at_least: lax", "8: rules.0.when: one has no threshold 'lax'; it has strict"),
        ("spans: {data: tool}", "spans: {date: tool}", "5: detectors.two.spans: fake has no span 'date'"),
        ("vector: calm", "vector: wild", "13: rules.1.steer: no steering vector 'wild'; there are: calm"),
        ("at_least: strict", "at_least: strict, below: 0.5", "8: rules.0.when: no score of one is at least 0.8 and"),
    ],
)
def test_names_that_do_not_exist_are_reported_at_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    loaded = load(tmp_path, POLICY.replace(old, new))
    with pytest.raises(PolicyError) as caught:
        bind(loaded, {"one": Fake(), "two": Fake()}, vectors=("calm",))
    assert message in str(caught.value)


OPTIONAL = """\
version: 1
name: test
detectors:
  made_up: {kind: h_node, optional: true, spans: {nowhere: user}}
  all: {kind: combination, optional: true, inputs: {h_node: made_up}}
rules:
  - {name: flagged, stage: output, when: {detector: made_up, at_least: fpr_1pct, below: fpr_5pct}, action: flag}
  - {name: let, stage: output, when: {detector: all, at_least: fpr_1pct}, action: block, on_error: allow}
"""


def test_a_detector_that_is_optional_is_unavailable_where_it_has_no_calibration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path, OPTIONAL)
    policy = bind(loaded, build_detectors(loaded, "some-model", tmp_path))
    assert not policy.spec.asks
    scores = policy.scores(readouts(0, 0))
    assert scores["made_up"].reason == "this model has no calibration of h_node: some-model.json is missing"
    decision = policy.decide(scores, "output")
    assert (decision.action, decision.flags) == ("flag", ("flagged",)), "no score is what on_error says"
    assert sum("no calibration of" in one.message for one in caplog.records) == 2
    with pytest.raises(PolicyError, match=r"made_up.*guard calibrate"):
        build_detectors(load(tmp_path, OPTIONAL.replace("optional: true, spans", "spans")), "some-model", tmp_path)


def test_a_file_that_is_there_and_wrong_is_refused_even_for_an_optional_detector(tmp_path: Path) -> None:
    (tmp_path / "h_node").mkdir()
    (tmp_path / "h_node" / "some-model.json").write_text("{}")
    with pytest.raises(PolicyError, match="model_info"):
        build_detectors(load(tmp_path, OPTIONAL), "some-model", tmp_path)
