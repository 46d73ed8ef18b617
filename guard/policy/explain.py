"""``guard policy explain``: for one request, what every rule makes of its scores, and which one decides.

Owns the words. Evaluates the policy as the proxy does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectors.base import Score
from detectors.numerals import numeral
from guard.policy.engine import CompiledRule, Decision, decide
from guard.policy.over_time import Outcome, Spread, decide_answer, hit_over_time
from guard.policy.recorded import Recorded
from guard.policy.schema import SEVERITY, Stage

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


def explain_answer(
    rules: Sequence[CompiledRule], whole: Mapping[str, Spread], end: Mapping[str, Spread] | None
) -> tuple[list[str], Outcome]:
    """The same of the rules for one answer. ``whole``, ``end``: as in ``decide_answer``."""
    outcome = decide_answer(rules, whole, end)
    lines = ["  scores:"]
    lines += [f"    {name}: {_spread(one)}" for name, one in whole.items()] or ["    none"]
    lines.append("  rules:")
    for one in rules:
        if one.rule.stage == "output" and end is None:
            lines.append(f"    {one.rule.name}: not judged: the answer did not come to its end")
        elif one.rule.stage != "prompt":
            at = whole if one.rule.stage == "stream" or end is None else end
            lines.append(f"  {_rule_over_time(one, at, outcome)}")
    decision = outcome.decision
    lines.append(f"  decision on the answer: {decision.action}, {_why(decision)}")
    if outcome.unsure:
        lines.append(f"  not known, since the ledger has not which scores met: {', '.join(outcome.unsure)}")
    return lines, outcome


def explain_together(prompt: Decision, answers: Sequence[Decision]) -> str:
    """What the decisions on a prompt and its answers come to."""
    worst = max((prompt, *answers), key=lambda one: SEVERITY[one.action])
    return f"decision on both: {worst.action}, {_why(worst)}"


def explain_record(entry: Recorded) -> list[str]:
    """What was recorded about a request at the time."""
    chosen = f"assignment {entry.assignment}" if entry.assignment else "the default"
    reason = f"rule {entry.rule}: {entry.reason}" if entry.rule else entry.reason or "no decision"
    return [
        f"request {entry.request_id}: policy {entry.policy}, by {chosen}",
        f"recorded: {entry.whole_action}, {reason}",
        *_by_part(entry),
        *(f"gate of rule {rule}: {_gate(told)}" for rule, told in entry.gates.items()),
    ]


def _by_part(entry: Recorded) -> list[str]:
    if not entry.answers:
        return []
    answers = ", then ".join(one.action for one in entry.answers)
    return [f"recorded of the prompt: {entry.action}; of the answer: {answers}"]


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


def _rule_over_time(one: CompiledRule, spreads: Mapping[str, Spread], outcome: Outcome) -> str:
    rule, (hit, _) = one.rule, hit_over_time(one, spreads)
    mark, reason = "no hit", one.verdict({name: spread.counts for name, spread in spreads.items()}).reason
    if hit is not None:
        mark, reason = "unknown" if hit.on_error else "hit", hit.reason
    elif rule.name in outcome.unsure:
        mark, reason = "not known", "it hits only where scores met that the ledger does not have together"
    shadow = ", shadow" if one.mode == "shadow" else ""
    decides = " <- decides" if outcome.decision.rule == rule.name else ""
    return f"  {rule.name} ({rule.stage}: {rule.action}, severity {rule.rank}{shadow}): {mark}: {reason}{decides}"


def _spread(spread: Spread) -> str:
    told = _score(spread.counts)
    if spread.lowest is not None and spread.lowest.value != spread.counts.value:
        told += f", lowest {_score(spread.lowest)}"
    others = [_score(one) for one in spread.without if one != spread.counts]
    return f"{told}; at times {', '.join(others)}" if others else told


def _why(decision: Decision) -> str:
    return f"by rule {decision.rule}: {decision.reason}" if decision.rule else decision.reason


def _score(score: Score) -> str:
    if score.status == "scored" and score.value is not None:
        return f"{numeral(score.value)} at least ({score.reason})" if score.floor else numeral(score.value)
    status = "timeout" if score.timed_out else score.status
    return f"{status} ({score.reason})" if score.reason else status
