"""Scores in, a decision out: pure, total, without I/O or clock.

Owns three-valued conditions, severity and shadow mode. A score that is missing makes a condition unknown, and an
unknown condition is what ``on_error`` says: never the same as false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from detectors.base import Score
from guard.mia.spec import Steer
from guard.policy.schema import (
    AllCondition,
    AnyCondition,
    Condition,
    Mode,
    NotCondition,
    Rule,
    ScoreCondition,
    StatusCondition,
    children,
)

Action = Literal["allow", "flag", "steer", "block"]
SEVERITY: dict[Action, int] = {"allow": 0, "flag": 1, "steer": 2, "block": 3}

NO_SCORE = Score("unavailable", reason="it was not measured")


@dataclass(frozen=True)
class RuleHit:
    """One rule that has something to say. ``action`` is ``allow`` only for an unknown condition under that on_error."""

    rule: str
    action: Action
    mode: Mode
    reason: str
    on_error: bool
    steer: tuple[Steer, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class Decision:
    """What is done, and why. ``would``: the action if shadow rules were enforced as well."""

    action: Action
    rule: str | None
    reason: str
    message: str
    hits: tuple[RuleHit, ...]
    steer: tuple[Steer, ...]
    flags: tuple[str, ...]
    would: Action


@dataclass(frozen=True)
class Verdict:
    """One condition's truth; None is unknown. ``reason`` names the scores that made it so."""

    value: bool | None
    reason: str


Check = Callable[[Mapping[str, Score]], Verdict]


@dataclass(frozen=True)
class CompiledRule:
    rule: Rule
    mode: Mode
    check: Check

    def hit(self, scores: Mapping[str, Score]) -> RuleHit | None:
        verdict = self.check(scores)
        rule = self.rule
        if verdict.value:
            return RuleHit(rule.name, rule.action, self.mode, verdict.reason, False, rule.steer, rule.message)
        if verdict.value is None:
            reason = f"{verdict.reason}: on_error {rule.on_error}"
            return RuleHit(rule.name, rule.on_error, self.mode, reason, True, message=rule.message)
        return None


def decide(rules: tuple[CompiledRule, ...], scores: Mapping[str, Score]) -> Decision:
    """The outcome of all rules. Without an enforced hit the request is allowed."""
    hits = tuple(hit for rule in rules if (hit := rule.hit(scores)) is not None)
    enforced = [hit for hit in hits if hit.mode == "enforce"]
    decisive = _first_most_severe(enforced)
    return Decision(
        action=decisive.action if decisive else "allow",
        rule=decisive.rule if decisive else None,
        reason=decisive.reason if decisive else "no rule hit",
        message=decisive.message if decisive else "",
        hits=hits,
        steer=decisive.steer if decisive else (),
        flags=tuple(hit.rule for hit in enforced if hit.action == "flag"),
        would=worst.action if (worst := _first_most_severe(hits)) else "allow",
    )


def _first_most_severe(hits: tuple[RuleHit, ...] | list[RuleHit]) -> RuleHit | None:
    return max(hits, key=lambda hit: SEVERITY[hit.action], default=None)


def compile_condition(condition: Condition, bound: Callable[[str, float | str], float]) -> Check:
    """``bound(detector, value)`` turns a threshold's name into its number."""
    if isinstance(condition, ScoreCondition):
        return _score_check(condition, bound)
    if isinstance(condition, StatusCondition):
        return _status_check(condition)
    checks = tuple(compile_condition(child, bound) for child in children(condition))
    if isinstance(condition, NotCondition):
        return lambda scores: _negate(checks[0](scores))
    assert isinstance(condition, AllCondition | AnyCondition)
    decisive = isinstance(condition, AnyCondition)
    return lambda scores: _join([check(scores) for check in checks], decisive)


def _negate(verdict: Verdict) -> Verdict:
    return Verdict(None if verdict.value is None else not verdict.value, f"not ({verdict.reason})")


def _join(verdicts: list[Verdict], decisive: bool) -> Verdict:
    """Kleene's logic: one ``decisive`` value settles it; else one unknown leaves it unknown; else it is the other."""
    for wanted in (decisive, None):
        chosen = [verdict for verdict in verdicts if verdict.value is wanted]
        if chosen:
            return Verdict(wanted, " and ".join(verdict.reason for verdict in chosen))
    return Verdict(not decisive, " and ".join(verdict.reason for verdict in verdicts))


def _score_check(condition: ScoreCondition, bound: Callable[[str, float | str], float]) -> Check:
    name = condition.detector
    low = None if condition.at_least is None else bound(name, condition.at_least)
    high = None if condition.below is None else bound(name, condition.below)
    wording = " and ".join(
        f"{sign} {value:.4g}" + (f" ({given})" if isinstance(given, str) else "")
        for sign, value, given in ((">=", low, condition.at_least), ("<", high, condition.below))
        if value is not None
    )

    def check(scores: Mapping[str, Score]) -> Verdict:
        score = scores.get(name, NO_SCORE)
        if score.status != "scored" or score.value is None:
            return Verdict(None, f"{name} unavailable: {score.reason}")
        inside = (low is None or score.value >= low) and (high is None or score.value < high)
        return Verdict(inside, f"{name} {score.value:.4g} {'' if inside else 'not '}{wording}")

    return check


def _status_check(condition: StatusCondition) -> Check:
    def check(scores: Mapping[str, Score]) -> Verdict:
        status = scores.get(condition.detector, NO_SCORE).status
        return Verdict(status == condition.status, f"{condition.detector} is {status}")

    return check
