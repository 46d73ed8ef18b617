"""A policy's rules taken apart for one request: every condition with the score and the number that it was compared to.

Owns the structure; ``guard.policy.explain`` has the words for a terminal. Evaluates conditions as the proxy does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Literal

from detectors.base import Score
from guard.policy.bound import BoundPolicy
from guard.policy.conditions import (
    AllCondition,
    AnyCondition,
    Condition,
    NotCondition,
    ScoreCondition,
    StatusCondition,
    children,
)
from guard.policy.engine import CompiledRule, compile_condition
from guard.policy.schema import Action, Mode, OnError, Stage

Form = Literal["score", "status", "all", "any", "not"]


@dataclass(frozen=True)
class Bound:
    """``value``: None for a threshold that nobody has measured for this model. ``name``: of the threshold, None where
    the policy has a number."""

    value: float | None
    name: str | None


@dataclass(frozen=True)
class Node:
    """One condition. ``holds``: None is unknown. ``detector``, ``at_least``, ``below``, ``status``: as the policy has
    them."""

    form: Form
    holds: bool | None
    reason: str
    detector: str | None = None
    at_least: Bound | None = None
    below: Bound | None = None
    status: str | None = None
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class DissectedRule:
    """``does``: what an unknown condition means for it, else its action. ``condition``: None where a gate in the engine
    is all."""

    name: str
    stage: Stage
    action: Action
    severity: int
    mode: Mode
    holds: bool | None
    does: Action | OnError
    reason: str
    armed: bool
    condition: Node | None


def dissect(
    policy: BoundPolicy,
    scores: Mapping[str, Score],
    stage: Stage,
    met: Mapping[str, Mapping[str, Score]] | None = None,
) -> list[DissectedRule]:
    """The rules of one stage, in the policy's order. ``met``: by rule, the scores to judge it on instead."""
    met = met or {}
    return [_rule(policy, one, met.get(one.rule.name, scores)) for one in policy.rules if one.rule.stage == stage]


def _rule(policy: BoundPolicy, one: CompiledRule, scores: Mapping[str, Score]) -> DissectedRule:
    rule, verdict = one.rule, one.verdict(scores)
    return DissectedRule(
        rule.name,
        rule.stage,
        rule.action,
        rule.rank,
        one.mode,
        verdict.value,
        one.on_unknown(verdict.timed_out)[1] if verdict.value is None else rule.action,
        verdict.reason,
        one.armed,
        None if rule.when is None else _node(policy, rule.when, scores),
    )


def _node(policy: BoundPolicy, condition: Condition, scores: Mapping[str, Score]) -> Node:
    verdict = compile_condition(condition, partial(_number, policy))(scores)
    node = partial(Node, holds=verdict.value, reason=verdict.reason)
    if isinstance(condition, ScoreCondition):
        name = condition.detector
        low, high = (_bound(policy, name, given) for given in (condition.at_least, condition.below))
        return node("score", detector=name, at_least=low, below=high)
    if isinstance(condition, StatusCondition):
        return node("status", detector=condition.detector, status=condition.status)
    forms: dict[type, Form] = {AllCondition: "all", AnyCondition: "any", NotCondition: "not"}
    return node(forms[type(condition)], parts=tuple(_node(policy, child, scores) for child in children(condition)))


def _bound(policy: BoundPolicy, detector: str, given: float | str | None) -> Bound | None:
    if given is None:
        return None
    value = _number(policy, detector, given)
    return Bound(value if isfinite(value) else None, given if isinstance(given, str) else None)


def _number(policy: BoundPolicy, detector: str, given: float | str) -> float:
    return given if isinstance(given, float) else policy.detectors[detector].thresholds[given]
