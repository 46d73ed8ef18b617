"""A policy's rules with numbers in place of thresholds' names, ready for ``guard.policy.engine``.

Owns the names of thresholds. Needs no model: anybody may say what a threshold's number is.
"""

from __future__ import annotations

from collections.abc import Mapping

from guard.policy.engine import CompiledRule, bounds_in, compile_condition
from guard.policy.loading import LoadedPolicy
from guard.policy.schema import Mode

Thresholds = Mapping[str, Mapping[str, float]]
"""Detector -> name of a threshold -> score."""


def compile_rules(loaded: LoadedPolicy, thresholds: Thresholds) -> tuple[CompiledRule, ...]:
    """Raises ``PolicyError`` for a threshold that nobody knows and for a range without scores."""
    return tuple(_compiled(loaded, i, thresholds) for i in range(len(loaded.policy.rules)))


def _compiled(loaded: LoadedPolicy, at: int, thresholds: Thresholds) -> CompiledRule:
    rule = loaded.policy.rules[at]

    def bound(detector: str, value: float | str) -> float:
        if isinstance(value, float):
            return value
        known = thresholds.get(detector, {})
        if value not in known:
            have = ", ".join(sorted(known)) or "none: no --model is given, or it was not calibrated"
            raise ValueError(f"{detector} has no threshold {value!r}; it has {have}")
        return known[value]

    mode: Mode = "shadow" if "shadow" in (loaded.policy.mode, rule.mode) else "enforce"
    try:
        if rule.when is None:
            return CompiledRule(rule, mode, None)
        return CompiledRule(rule, mode, compile_condition(rule.when, bound), bounds_in(rule.when, bound))
    except ValueError as error:
        raise loaded.error(("rules", at, "when"), str(error)) from None
