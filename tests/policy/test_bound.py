"""A policy bound to detectors asks for what they need, under names of its own, and hands each what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from detectors.base import CapturePlan, Score
from guard.mia.results import AttentionReadout, HiddenReadout, Readout, Readouts
from guard.mia.spec import AttentionCapture, HiddenCapture
from guard.policy import PolicyError, bind, load_policy

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


def test_a_detector_that_raises_gives_no_score_and_the_others_do(tmp_path: Path) -> None:
    class Broken(Fake):
        def score(self, readouts: Mapping[str, Readout]) -> Score:
            raise ZeroDivisionError("private words")

    scores = bind(load(tmp_path), {"one": Broken(), "two": Fake()}).scores(readouts(0, 0.5))
    assert scores["one"] == Score("unavailable", reason="the detector failed (ZeroDivisionError)")
    assert scores["two"].status == "scored"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("at_least: strict", "at_least: lax", "8: rules.0.when: one has no threshold 'lax'; it has strict"),
        ("spans: {data: tool}", "spans: {date: tool}", "5: detectors.two.spans: fake has no span 'date'"),
        ("vector: calm", "vector: wild", "13: rules.1.steer: no steering vector 'wild'; there are: calm"),
    ],
)
def test_names_that_do_not_exist_are_reported_at_their_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    loaded = load(tmp_path, POLICY.replace(old, new))
    with pytest.raises(PolicyError) as caught:
        bind(loaded, {"one": Fake(), "two": Fake()}, vectors=("calm",))
    assert message in str(caught.value)
