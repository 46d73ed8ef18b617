"""Decisions: three-valued conditions, severity, shadow mode, and what is said about scores that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.base import Score
from guard.policy.engine import CompiledRule, Decision, compile_condition, decide, longest_wait_s
from guard.policy.schema import SEVERITY, Rule

unhurried = settings(deadline=None, max_examples=60)
"""Other processes may take the machine from a test."""

STEER = [{"vector": "calm", "layer": 3, "coefficient": 2.0}]
MISSING = Score("unavailable", reason="no space")
LATE = Score("unavailable", reason="late", timed_out=True)
ELSEWHERE = Score("not_applicable", reason="no tool result")


def rule(name: str, when: dict[str, Any], action: str = "block", mode: str = "enforce", **more: Any) -> CompiledRule:
    if action in ("steer", "retry"):
        more["steer"] = STEER
    if action == "redact":
        more["redact"] = {"messages": ["user"]} if more.get("stage", "prompt") == "prompt" else {}
    if action == "route":
        more["route"] = {"model": "other"}
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


@pytest.mark.parametrize(
    ("scores", "action"),
    [
        ({"a": LATE}, "allow"), ({"a": MISSING}, "block"),
        ({"a": LATE, "b": LATE}, "allow"), ({"a": LATE, "b": MISSING}, "block"),
    ],
)  # fmt: skip
def test_a_score_that_is_late_is_for_on_timeout_and_any_other_missing_one_for_on_error(
    scores: dict[str, Score], action: str
) -> None:
    when = {"all": [A_HIGH, B_HIGH]} if "b" in scores else A_HIGH
    decision = run([rule("r", when, on_error="block", on_timeout="allow")], scores)
    assert decision.action == action
    assert decision.hits[0].timed_out == (action == "allow")


def test_without_on_timeout_a_late_score_is_for_on_error() -> None:
    assert run([rule("r", A_HIGH, on_error="block")], {"a": LATE}).action == "block"


def test_a_detector_that_does_not_apply_is_false_and_not_unknown() -> None:
    assert run([rule("r", A_HIGH, on_error="block")], {"a": ELSEWHERE}).hits == ()
    assert run([rule("r", {"not": A_HIGH})], {"a": ELSEWHERE}).action == "block"


@pytest.mark.parametrize(
    ("score", "true"),
    [
        (Score("scored", 0.1), {"scored"}), (MISSING, {"unavailable"}), (LATE, {"unavailable", "timeout"}),
        (ELSEWHERE, {"not_applicable"}),
    ],
)  # fmt: skip
def test_a_timeout_is_one_way_of_being_unavailable(score: Score, true: set[str]) -> None:
    asked = ("scored", "unavailable", "timeout", "not_applicable")
    found = {s for s in asked if run([rule("r", {"detector": "a", "status": s})], {"a": score}).action == "block"}
    assert found == true


def test_declared_severity_decides_and_equals_are_decided_by_the_first() -> None:
    rules = [rule("first", A_HIGH, "steer"), rule("second", A_HIGH, "route", severity=30), rule("f", A_HIGH, "flag")]
    assert run(rules, scored(a=1)).rule == "first"
    rules[1] = rule("second", A_HIGH, "route", severity=31)
    decision = run(rules, scored(a=1))
    assert (decision.action, decision.rule, decision.flags) == ("route", "second", ("f",))
    assert decision.by is not None
    assert decision.by.route is not None
    assert decision.by.route.model == "other"


def test_a_stage_is_judged_by_its_own_rules() -> None:
    rules = [rule("before", A_HIGH, "flag"), rule("after", A_HIGH, "retry", stage="output", attempts=2)]
    compiled = tuple(rules)
    assert [hit.rule for hit in decide(compiled, scored(a=1), "prompt").hits] == ["before"]
    decision = decide(compiled, scored(a=1), "output")
    assert (decision.action, decision.by and decision.by.attempts) == ("retry", 2)
    assert decide(compiled, scored(a=1), "stream").hits == ()


def test_a_range_without_scores_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no score of a is at least 0\.5 and below 0\.5"):
        rule("r", {"detector": "a", "at_least": 0.5, "below": 0.5})


@pytest.mark.parametrize(
    ("rules", "wait_s"),
    [
        ([], 0),
        ([rule("r", A_HIGH)], 30),
        ([rule("r", A_HIGH, mode="shadow")], 0),
        ([rule("r", A_HIGH, timeout_s=2), rule("s", A_HIGH, timeout_s=5)], 5),
        ([rule("r", A_HIGH, timeout_s=2, on_timeout="block"), rule("s", A_HIGH, timeout_s=5)], 2),
        ([rule("r", A_HIGH, timeout_s=2, on_error="block"), rule("s", A_HIGH)], 2),
        ([rule("r", A_HIGH, timeout_s=2, stage="output")], 0),
    ],
)
def test_an_answer_is_held_until_nothing_that_comes_could_change_the_decision(
    rules: list[CompiledRule], wait_s: float
) -> None:
    assert longest_wait_s(rules, 30) == wait_s


conditions = st.recursive(
    st.sampled_from([A_HIGH, B_HIGH, {"detector": "a", "status": "scored"}, {"detector": "b", "below": 0.2}]),
    lambda inner: st.one_of(
        st.builds(lambda c: {"all": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"any": c}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda c: {"not": c}, inner),
    ),
    max_leaves=6,
)
any_score = st.floats(0, 1).map(lambda v: Score("scored", v)) | st.sampled_from([MISSING, LATE, ELSEWHERE])
scores = st.dictionaries(st.sampled_from(["a", "b", "c"]), any_score)
outcomes = st.sampled_from(["block", "allow", "flag"])
actions = st.sampled_from(["block", "flag", "steer", "redact", "route"])
rules = st.lists(
    st.builds(
        rule,
        st.sampled_from(["r1", "r2", "r3"]),
        conditions,
        actions,
        st.sampled_from(["enforce", "shadow"]),
        on_error=outcomes,
        on_timeout=outcomes | st.none(),
    ),
    max_size=5,
    unique_by=lambda compiled: compiled.rule.name,
)


@unhurried
@given(rules, scores)
def test_every_input_has_one_decision_that_its_enforced_hits_explain(
    compiled: list[CompiledRule], given_scores: dict[str, Score]
) -> None:
    decision = run(compiled, given_scores)
    enforced = [hit for hit in decision.hits if hit.mode == "enforce"]
    assert SEVERITY[decision.action] == max((SEVERITY[hit.action] for hit in enforced), default=0)
    assert (decision.rule is None) == (not enforced)
    assert bool(decision.steer) == (decision.action == "steer")
    assert SEVERITY[decision.would] >= SEVERITY[decision.action]
    assert decision == run(compiled, given_scores)


@unhurried
@given(rules, st.builds(rule, st.just("more"), conditions, actions, on_error=outcomes), scores)
def test_one_more_rule_never_makes_a_decision_less_severe(
    compiled: list[CompiledRule], more: CompiledRule, given_scores: dict[str, Score]
) -> None:
    before, after = run(compiled, given_scores), run([*compiled, more], given_scores)
    assert SEVERITY[after.action] >= SEVERITY[before.action]
    assert set(after.flags) >= set(before.flags)


@unhurried
@given(st.data(), st.sampled_from(["flag", "redact", "steer", "route", "block"]), st.booleans())
def test_whatever_severities_are_declared_a_block_blocks_and_a_flag_hides_nothing(
    data: st.DataObject, action: str, first: bool
) -> None:
    band = {"flag": (1, 9), "block": (90, 99)}.get(action, (10, 89))
    other = rule("other", A_HIGH, action, severity=data.draw(st.integers(*band)))
    block = rule("block", A_HIGH, severity=data.draw(st.integers(90, 99)))
    assert run([other, block] if first else [block, other], scored(a=1)).action == "block"
    flag = rule("flag", A_HIGH, "flag", severity=data.draw(st.integers(1, 9)))
    assert run([other, flag] if first else [flag, other], scored(a=1)).action == action


@unhurried
@given(rules, rules, scores)
def test_rules_in_shadow_change_nothing_but_what_is_recorded(
    enforced: list[CompiledRule], more: list[CompiledRule], given_scores: dict[str, Score]
) -> None:
    shadows = [replace(one, mode="shadow", rule=one.rule.model_copy(update={"name": f"s-{i}"}))
               for i, one in enumerate(more)]  # fmt: skip
    alone, beside = run(enforced, given_scores), run([*shadows, *enforced], given_scores)
    assert replace(beside, hits=(), would="allow") == replace(alone, hits=(), would="allow")
    assert [hit for hit in beside.hits if not hit.rule.startswith("s-")] == list(alone.hits)


@unhurried
@given(conditions, scores, outcomes, outcomes | st.none())
def test_an_unknown_condition_is_never_clean(
    when: dict[str, Any], given_scores: dict[str, Score], on_error: str, on_timeout: str | None
) -> None:
    """A rule passes a request without a word only when no score that is missing could have made it hit."""
    compiled = rule("r", when, on_error=on_error, on_timeout=on_timeout)
    decision = run([compiled], given_scores)
    names = ("a", "b", "c")
    missing = [n for n in names if given_scores.get(n, MISSING).status == "unavailable"]
    filled = [{**given_scores, **{n: Score("scored", v) for n in missing}} for v in (0.0, 0.3, 1.0)]
    if not missing or _asks_status(when):
        return
    if not decision.hits:
        assert not any(run([compiled], one).hits for one in filled)
    elif decision.hits[0].on_error:
        assert decision.action in (on_error, on_timeout)


def _asks_status(when: dict[str, Any]) -> bool:
    return "status" in str(when)


@pytest.mark.parametrize(("value", "actions"), [(0.4, ["flag"]), (0.6, ["flag", "steer"]), (0.8, ["block"])])
def test_a_score_that_may_be_higher_hits_what_it_reaches_and_is_unknown_above(value: float, actions: list[str]) -> None:
    rules = [
        rule("stop", {"detector": "a", "at_least": 0.8}, on_error="flag"),
        rule("calm", {"detector": "a", "at_least": 0.5, "below": 0.8}, "steer", on_error="allow"),
    ]
    floor = replace(scored(a=value)["a"], floor=True, reason="it sees less")
    decision = run(rules, {"a": floor})
    assert sorted(hit.action for hit in decision.hits if hit.action != "allow") == actions
    if value < 0.5:
        assert decision.reason == "a 0.4 at least: it sees less: on_error flag"
