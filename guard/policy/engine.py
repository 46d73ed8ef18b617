"""Scores in, a decision out: pure, total, without I/O or clock.

Owns three-valued conditions, severity and shadow mode. A score that is missing makes a condition unknown, and an
unknown condition is what ``on_error`` or ``on_timeout`` says: never the same as false.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from detectors.base import Score
from detectors.numerals import numeral
from guard.mia.spec import Steer
from guard.policy.conditions import (
    AllCondition,
    AnyCondition,
    Condition,
    NotCondition,
    ScoreCondition,
    StatusCondition,
    children,
)
from guard.policy.schema import SEVERITY, Action, Mode, OnError, Redaction, Rule, Stage, detectors_in

NO_SCORE = Score("unavailable", reason="it was not measured")


@dataclass(frozen=True)
class RuleHit:
    """One rule that has something to say. ``action`` is ``allow`` only for an unknown condition under that on_error.

    ``on_error``: the condition is unknown; ``timed_out``: because scores did not come in time.
    """

    rule: str
    action: Action
    mode: Mode
    reason: str
    on_error: bool
    steer: tuple[Steer, ...] = ()
    message: str = ""
    severity: int = 0
    timed_out: bool = False
    redact: Redaction | None = None


@dataclass(frozen=True)
class Decision:
    """What is done, and why. ``would``: the action if shadow rules were enforced as well.

    ``by``: the rule whose fields say how the action is carried out; None where nothing or ``on_error`` decided.
    """

    action: Action
    rule: str | None
    reason: str
    message: str
    hits: tuple[RuleHit, ...]
    steer: tuple[Steer, ...]
    flags: tuple[str, ...]
    would: Action
    by: Rule | None = None


@dataclass(frozen=True)
class Verdict:
    """One condition's truth; None is unknown. ``reason`` names the scores that made it so.

    ``timed_out``: unknown, and every score that is missing is one that did not come in time.
    """

    value: bool | None
    reason: str
    timed_out: bool = False


Bound = tuple[str, str, float]
"""A detector, ``at_least`` or ``below``, and the score that this is."""

Check = Callable[[Mapping[str, Score]], Verdict]


@dataclass(frozen=True)
class CompiledRule:
    """A rule whose thresholds are numbers. ``check``: None when a gate in the engine is its only condition.
    ``bounds``: every number that it compares a score with."""

    rule: Rule
    mode: Mode
    check: Check | None
    bounds: tuple[Bound, ...] = ()

    @property
    def armed(self) -> bool:
        """Whether its steering goes with every request."""
        return self.check is None and self.mode == "enforce"

    def verdict(self, scores: Mapping[str, Score]) -> Verdict:
        if self.check is None:
            return Verdict(False, "its gate in the engine decides")
        return self.check(scores)

    def hit(self, scores: Mapping[str, Score]) -> RuleHit | None:
        verdict, rule = self.verdict(scores), self.rule
        if verdict.value:
            return RuleHit(
                rule.name,
                rule.action,
                self.mode,
                verdict.reason,
                False,
                rule.steer,
                rule.message,
                rule.rank,
                redact=rule.redact,
            )
        if verdict.value is None:
            name, action = self.on_unknown(verdict.timed_out)
            reason = f"{verdict.reason}: {name} {action}"
            return RuleHit(
                rule.name,
                action,
                self.mode,
                reason,
                True,
                message=rule.message,
                severity=SEVERITY[action],
                timed_out=verdict.timed_out,
            )
        return None

    def on_unknown(self, timed_out: bool) -> tuple[str, OnError]:
        """The field that says what an unknown condition means, and what it says."""
        if timed_out and self.rule.on_timeout is not None:
            return "on_timeout", self.rule.on_timeout
        return "on_error", self.rule.on_error


def decide(rules: Sequence[CompiledRule], scores: Mapping[str, Score], stage: Stage = "prompt") -> Decision:
    """The outcome of one stage's rules. Without an enforced hit the request is allowed."""
    here = [compiled for compiled in rules if compiled.rule.stage == stage]
    return decision_of(here, [hit for compiled in here if (hit := compiled.hit(scores)) is not None])


def decision_of(rules: Sequence[CompiledRule], hits: Sequence[RuleHit]) -> Decision:
    """What these hits of these rules come to."""
    enforced = [hit for hit in hits if hit.mode == "enforce"]
    decisive = _most_severe(enforced)
    acts = decisive is not None and not decisive.on_error
    return Decision(
        action=decisive.action if decisive else "allow",
        rule=decisive.rule if decisive else None,
        reason=decisive.reason if decisive else "no rule hit",
        message=decisive.message if decisive else "",
        hits=tuple(hits),
        steer=decisive.steer if decisive else (),
        flags=tuple(hit.rule for hit in enforced if hit.action == "flag"),
        would=worst.action if (worst := _most_severe(hits)) else "allow",
        by=next((one.rule for one in rules if acts and decisive and one.rule.name == decisive.rule), None),
    )


def longest_wait_s(rules: Sequence[CompiledRule], timeout_s: float, stage: Stage = "prompt") -> float:
    """How long an answer may be held for the scores of one stage, in seconds; 0 when no enforced rule needs any.

    timeout_s: of rules that declare none. A rule that blocks once its time is over ends the wait for all: nothing that
    comes later can change the decision.
    """
    waiting = [one for one in rules if one.rule.stage == stage and one.mode == "enforce" and one.check is not None]
    times = [one.rule.timeout_s or timeout_s for one in waiting]
    ending = [time for one, time in zip(waiting, times, strict=True) if blocks_when_late(one)]
    return min([*ending, max(times)]) if times else 0.0


def blocks_when_late(compiled: CompiledRule) -> bool:
    """Whether it blocks when none of its scores comes in time."""
    late = Score("unavailable", reason="late", timed_out=True)
    hit = None if compiled.check is None else compiled.hit(dict.fromkeys(detectors_in(compiled.rule), late))
    return hit is not None and hit.action == "block"


def _most_severe(hits: Sequence[RuleHit]) -> RuleHit | None:
    """The first of the most severe ones."""
    return max(hits, key=lambda hit: hit.severity, default=None)


def compile_condition(condition: Condition, bound: Callable[[str, float | str], float]) -> Check:
    """``bound(detector, value)`` turns a threshold's name into its number. Raises ``ValueError`` for a range that is
    empty."""
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


def bounds_in(condition: Condition, bound: Callable[[str, float | str], float]) -> tuple[Bound, ...]:
    """All that a condition compares scores with, each once. ``bound``: as in ``compile_condition``."""
    if isinstance(condition, ScoreCondition):
        name, given = condition.detector, (("at_least", condition.at_least), ("below", condition.below))
        return tuple((name, side, bound(name, value)) for side, value in given if value is not None)
    return tuple(dict.fromkeys(one for child in children(condition) for one in bounds_in(child, bound)))


def _negate(verdict: Verdict) -> Verdict:
    value = None if verdict.value is None else not verdict.value
    return Verdict(value, f"not ({verdict.reason})", verdict.timed_out)


def _join(verdicts: list[Verdict], decisive: bool) -> Verdict:
    """Kleene's logic: one ``decisive`` value settles it; else one unknown leaves it unknown; else it is the other."""
    for wanted in (decisive, None):
        chosen = [verdict for verdict in verdicts if verdict.value is wanted]
        if chosen:
            late = wanted is None and all(verdict.timed_out for verdict in chosen)
            return Verdict(wanted, " and ".join(verdict.reason for verdict in chosen), late)
    return Verdict(not decisive, " and ".join(verdict.reason for verdict in verdicts))


def _score_check(condition: ScoreCondition, bound: Callable[[str, float | str], float]) -> Check:
    """Raises ``ValueError`` for bounds that no score can meet."""
    name = condition.detector
    low = None if condition.at_least is None else bound(name, condition.at_least)
    high = None if condition.below is None else bound(name, condition.below)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"no score of {name} is at least {numeral(low, high)} and below {numeral(high, low)}")
    bounds = [
        (sign, value, f" ({given})" if isinstance(given, str) else "")
        for sign, value, given in ((">=", low, condition.at_least), ("<", high, condition.below))
        if value is not None
    ]

    def check(scores: Mapping[str, Score]) -> Verdict:
        score = scores.get(name, NO_SCORE)
        if score.status == "not_applicable":
            return Verdict(False, f"{name} not applicable: {score.reason}")
        if score.status != "scored" or score.value is None:
            return Verdict(None, f"{name} unavailable: {score.reason}", score.timed_out)
        inside = (low is None or score.value >= low) and (high is None or score.value < high)
        # Of a range the lower bound counts: what reaches it has reached what the rule is for.
        lowest = low if low is not None else high
        if score.floor and lowest is not None and score.value < lowest:
            return Verdict(None, f"{name} {numeral(score.value, lowest)} at least: {score.reason}", score.timed_out)
        told = numeral(score.value, *(bound for _, bound, _ in bounds))
        asked = " and ".join(f"{sign} {numeral(bound, score.value)}{given}" for sign, bound, given in bounds)
        return Verdict(inside, f"{name} {told} {'' if inside else 'not '}{asked}")

    return check


def _status_check(condition: StatusCondition) -> Check:
    def check(scores: Mapping[str, Score]) -> Verdict:
        score = scores.get(condition.detector, NO_SCORE)
        late = condition.status == "timeout" and score.status == "unavailable" and score.timed_out
        status = "timeout" if late else score.status
        return Verdict(status == condition.status, f"{condition.detector} is {status}")

    return check
