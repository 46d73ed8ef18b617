"""``guard policy explain``: for one request, what every rule makes of its scores, and which one decides.

Owns the words. Evaluates the policy as the proxy does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectors.base import Score
from guard.policy.engine import CompiledRule, Decision, decide
from guard.policy.recorded import Recorded
from guard.policy.schema import Stage

MARKS = {True: "hit", False: "no hit", None: "unknown"}


def explain(rules: Sequence[CompiledRule], scores: Mapping[str, Score], stage: Stage = "prompt") -> list[str]:
    """Lines for people: scores, every rule with the reason, the decision."""
    decision = decide(rules, scores, stage)
    lines = ["scores:"]
    lines += [f"  {name}: {_score(score)}" for name, score in scores.items()] or ["  none"]
    lines.append("rules:")
    lines += [_rule(one, scores, decision) for one in rules if one.rule.stage == stage] or ["  none"]
    lines.append(f"decision: {decision.action}, {_why(decision)}")
    if decision.flags:
        lines.append(f"flags: {', '.join(decision.flags)}")
    if decision.would != decision.action:
        lines.append(f"with the shadow rules enforced: {decision.would}")
    return lines


def explain_record(entry: Recorded) -> list[str]:
    """What was recorded about a request at the time."""
    chosen = f"assignment {entry.assignment}" if entry.assignment else "the default"
    reason = f"rule {entry.rule}: {entry.reason}" if entry.rule else entry.reason or "no decision"
    return [
        f"request {entry.request_id}: policy {entry.policy}, by {chosen}",
        f"recorded: {entry.action}, {reason}",
        *(f"gate of rule {rule}: {_gate(told)}" for rule, told in entry.gates.items()),
    ]


def _gate(told: Mapping[str, Any]) -> str:
    if not told.get("opened"):
        return f"stayed shut{f': {reason}' if (reason := told.get('reason')) else ''}"
    return f"opened in {told['opened']} of {told.get('choices')} choices, first at token {told.get('first_at')}"


def _rule(one: CompiledRule, scores: Mapping[str, Score], decision: Decision) -> str:
    rule, verdict = one.rule, one.verdict(scores)
    mark = MARKS[verdict.value]
    if one.check is None:
        mark = "armed" if one.armed else "not armed"
    acts = f"{rule.action}, severity {rule.rank}"
    if verdict.value is None:
        acts = " ".join(one.on_unknown(verdict.timed_out))
    shadow = ", shadow" if one.mode == "shadow" else ""
    decides = " <- decides" if decision.rule == rule.name else ""
    return f"  {rule.name} ({acts}{shadow}): {mark}: {verdict.reason}{decides}"


def _why(decision: Decision) -> str:
    return f"by rule {decision.rule}: {decision.reason}" if decision.rule else decision.reason


def _score(score: Score) -> str:
    if score.status == "scored" and score.value is not None:
        return f"{score.value:.4g}"
    status = "timeout" if score.timed_out else score.status
    return f"{status} ({score.reason})" if score.reason else status
