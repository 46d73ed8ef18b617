"""Decisions: three-valued conditions, severity, shadow mode, and on_error for scores that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.base import Score
from guard.policy.engine import CompiledRule, Decision, compile_condition, decide
from guard.policy.schema import Rule

STEER = [{"vector": "calm", "layer": 3, "coefficient": 2.0}]
MISSING = Score("unavailable", reason="no space")


def rule(name: str, when: dict[str, Any], action: str = "block", mode: str = "enforce", **more: Any) -> CompiledRule:
    if action == "steer":
        more["steer"] = STEER
    checked = Rule.model_validate({"name": name, "when": when, "action": action, "mode": mode} | more)
    return CompiledRule(checked, checked.mode, compile_condition(checked.when, lambda _detector, value: float(value)))


def scored(**values: float) -> dict[str, Score]:
    return {name: Score("scored", value) for name, value in values.items()}


def run(rules: list[CompiledRule], scores: Mapping[str, Score]) -> Decision:
    return decide(tuple(rules), scores)


A_HIGH, B_HIGH = {"detector": "a", "at_least": 0.5}, {"detector": "b", "at_least": 0.5}


@pytest.mark.parametrize(("value", "hit"), [(0.49, False), (0.5, True), (0.79, True), (0.8, False)])
def test_a_range_includes_its_lower_bound_and_not_its_upper(value: float, hit: bool) -> None:
    when = {"detector": "a", "at_least": 0.5, "below": 0.8}
    assert (run([rule("r", when)], scored(a=value)).action == "block") == hit


@pytest.mark.parametrize(
    ("form", "a", "b", "truth"),
    [
        ("all", True, True, True), ("all", True, False, False), ("all", False, None, False), ("all", True, None, None),
        ("any", False, False, False), ("any", True, None, True), ("any", False, None, None), ("any", True, False, True),
    ],
)  # fmt: skip
def test_unknown_scores_follow_kleenes_logic(form: str, a: bool | None, b: bool | None, truth: bool | None) -> None:
    scores = {n: MISSING if v is None else Score("scored", float(v)) for n, v in (("a", a), ("b", b))}
    decision = run([rule("r", {form: [A_HIGH, B_HIGH]}, on_error="flag")], scores)
    assert decision.action == {True: "block", False: "allow", None: "flag"}[truth]
    inverted = run([rule("r", {"not": {form: [A_HIGH, B_HIGH]}}, on_error="flag")], scores)
    assert inverted.action == {True: "allow", False: "block", None: "flag"}[truth]


@pytest.mark.parametrize("on_error", ["block", "allow", "flag"])
def test_a_missing_score_is_never_clean(on_error: str) -> None:
    for scores in ({}, {"a": MISSING}, {"a": Score("scored", None)}):
        decision = run([rule("r", A_HIGH, on_error=on_error)], scores)
        assert decision.action == on_error
        (hit,) = decision.hits
        assert hit.on_error
        assert "unavailable" in hit.reason


def test_a_status_can_be_asked_for() -> None:
    down = rule("down", {"detector": "a", "status": "unavailable"}, "flag")
    assert run([down], {"a": MISSING}).action == "flag"
    assert run([down], scored(a=0.1)).action == "allow"


def test_the_most_severe_hit_decides_and_every_flag_is_reported() -> None:
    rules = [
        rule("f1", A_HIGH, "flag"),
        rule("s", A_HIGH, "steer"),
        rule("b1", B_HIGH),
        rule("b2", B_HIGH),
        rule("f2", A_HIGH, "flag"),
    ]
    decision = run(rules, scored(a=0.9, b=0.9))
    assert (decision.action, decision.rule, decision.flags) == ("block", "b1", ("f1", "f2"))
    decision = run(rules, scored(a=0.9, b=0.1))
    assert (decision.action, decision.rule) == ("steer", "s")
    assert decision.steer[0].vector == "calm"


def test_shadow_rules_are_recorded_and_do_nothing() -> None:
    decision = run([rule("b", A_HIGH, mode="shadow"), rule("f", A_HIGH, "flag")], scored(a=0.9))
    assert (decision.action, decision.would) == ("flag", "block")
    assert [(hit.rule, hit.mode) for hit in decision.hits] == [("b", "shadow"), ("f", "enforce")]
    assert run([rule("b", A_HIGH, mode="shadow", on_error="block")], {}).action == "allow"


def test_the_reason_names_score_and_threshold() -> None:
    assert run([rule("r", A_HIGH)], scored(a=0.75)).reason == "a 0.75 >= 0.5"


conditions = st.recursive(
    st.sampled_from([A_HIGH, B_HIGH, {"detector": "a", "status": "scored"}, {"detector": "b", "below": 0.2}]),
    lambda inner: st.one_of(
        st.builds(lambda c: {"all": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"any": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"not": c}, inner),
    ),
    max_leaves=6,
)
scores = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.floats(0, 1).map(lambda v: Score("scored", v)) | st.just(MISSING)
)
rules = st.lists(
    st.builds(
        rule,
        st.sampled_from(["r1", "r2", "r3"]),
        conditions,
        st.sampled_from(["block", "flag", "steer"]),
        st.sampled_from(["enforce", "shadow"]),
        on_error=st.sampled_from(["block", "allow", "flag"]),
    ),
    max_size=5,
)


@given(rules, scores)
def test_every_input_has_one_decision_that_its_enforced_hits_explain(
    compiled: list[CompiledRule], given_scores: dict[str, Score]
) -> None:
    decision = run(compiled, given_scores)
    enforced = [hit.action for hit in decision.hits if hit.mode == "enforce"]
    rank = ["allow", "flag", "steer", "block"]
    assert decision.action == max(enforced, key=rank.index, default="allow")
    assert (decision.rule is None) == (not enforced)
    assert bool(decision.steer) == (decision.action == "steer")
    assert rank.index(decision.would) >= rank.index(decision.action)
    assert decision == run(compiled, given_scores)
