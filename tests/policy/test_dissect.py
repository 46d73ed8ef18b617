"""A rule taken apart says of every condition what the engine makes of it, down to each score and threshold."""

from __future__ import annotations

from pathlib import Path

from detectors.base import Score
from guard.policy import BoundPolicy, bind, load_policy
from guard.policy.dissect import Bound, dissect

POLICY = """\
version: 1
name: test
detectors:
  a: {kind: words}
  b: {kind: words}
rules:
  - name: both
    when:
      all:
        - {detector: a, at_least: high}
        - not: {any: [{detector: b, below: 0.5}, {detector: b, status: timeout}]}
    action: block
    on_error: flag
    on_timeout: block
  - {name: after, stage: output, when: {detector: a, at_least: 0.1}, action: flag}
"""


class Words:
    kind = "words"
    thresholds = {"high": 0.8}  # noqa: RUF012 - a detector has them as it likes

    def score_text(self, text: str) -> Score:
        return Score("scored", 0.0)


def bound(tmp_path: Path) -> BoundPolicy:
    (tmp_path / "policy.yaml").write_text(POLICY)
    return bind(load_policy(tmp_path / "policy.yaml"), {"a": Words(), "b": Words()})


def test_every_condition_has_its_score_its_threshold_and_whether_it_holds(tmp_path: Path) -> None:
    (rule,) = dissect(bound(tmp_path), {"a": Score("scored", 0.9), "b": Score("scored", 0.7)}, "prompt")
    assert (rule.name, rule.holds, rule.does, rule.severity) == ("both", True, "block", 95)
    condition = rule.condition
    assert condition is not None
    high, none_of = condition.parts
    assert (condition.form, high.holds, high.at_least) == ("all", True, Bound(0.8, "high"))
    (either,) = none_of.parts
    assert (none_of.form, none_of.holds, either.form, either.holds) == ("not", True, "any", False)
    low, late = either.parts
    assert (low.detector, low.below, low.holds) == ("b", Bound(0.5, None), False)
    assert (late.form, late.status, late.holds) == ("status", "timeout", False)


def test_what_is_unknown_is_neither_true_nor_false_and_says_what_is_done(tmp_path: Path) -> None:
    for timed_out, does in ((False, "flag"), (True, "block")):
        missing = Score("unavailable", reason="gone", timed_out=timed_out)
        (rule,) = dissect(bound(tmp_path), {"a": missing, "b": Score("scored", 0.7)}, "prompt")
        assert (rule.holds, rule.does) == (None, does)
        assert rule.condition is not None
        assert rule.condition.parts[0].holds is None


def test_only_the_rules_of_the_stage_are_there(tmp_path: Path) -> None:
    assert [one.name for one in dissect(bound(tmp_path), {}, "output")] == ["after"]
