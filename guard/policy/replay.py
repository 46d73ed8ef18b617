"""``guard policy replay``: what a candidate policy would have decided on requests that a ledger has scores of.

Owns the comparison and its summary. Nothing is measured again: a request whose scores the candidate would have read
otherwise is counted apart, and never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from guard.policy.engine import CompiledRule, decide
from guard.policy.loading import LoadedPolicy, digests
from guard.policy.recorded import UNDECIDED, Recorded
from guard.policy.schema import SEVERITY, detectors_in

FailOn = Literal["any", "looser", "stricter"]
MAX_EXAMPLES = 3


@dataclass
class Change:
    """Requests whose action goes from one to another. ``rules``: which rules of the candidate decide."""

    before: str
    after: str
    requests: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def looser(self) -> bool:
        return _severity(self.after) < _severity(self.before)


@dataclass
class Replayed:
    """What came out. ``undecided``: requests that ended before a decision; ``incomplete``: those whose entry lacks a
    score that the candidate reads, by detector in ``not_measured``; ``others``: those that another policy judged than
    the one asked for; ``unreadable``: lines that are no entry."""

    compared: int = 0
    unchanged: Counter[str] = field(default_factory=Counter)
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    undecided: int = 0
    not_measured: Counter[str] = field(default_factory=Counter)
    incomplete: int = 0
    others: int = 0
    unreadable: int = 0

    def changed(self, fail_on: FailOn = "any") -> int:
        """Requests whose action changes, or does so in one direction."""
        wanted = {"any": (True, False), "looser": (True,), "stricter": (False,)}[fail_on]
        return sum(change.requests for change in self.changes.values() if change.looser in wanted)

    def percent(self, fail_on: FailOn = "any") -> float:
        return 100 * self.changed(fail_on) / self.compared if self.compared else 0.0

    def to_json(self) -> dict[str, Any]:
        changes = [
            {
                "before": one.before,
                "after": one.after,
                "requests": one.requests,
                "rules": dict(one.rules),
                "examples": one.examples,
            }
            for one in self.changes.values()
        ]
        return {
            "compared": self.compared,
            "changed": self.changed(),
            "looser": self.changed("looser"),
            "stricter": self.changed("stricter"),
            "changes": changes,
            "unchanged": dict(self.unchanged),
            "undecided": self.undecided,
            "not_measured": dict(self.not_measured),
            "incomplete": self.incomplete,
            "others": self.others,
            "unreadable": self.unreadable,
        }


def replay(
    loaded: LoadedPolicy,
    rules: Sequence[CompiledRule],
    entries: Iterable[Recorded | None],
    judged_by: str | None = None,
) -> Replayed:
    """Compare the recorded decisions with the candidate's on the same scores. ``rules``: the candidate's, compiled.

    ``judged_by``: only requests that the policy of this name judged.
    """
    result = Replayed()
    used = {name for one in rules if one.rule.stage == "prompt" for name in detectors_in(one.rule)}
    measured_as = {name: digest for name, digest in digests(loaded).items() if name in used}
    for entry in entries:
        if entry is None:
            result.unreadable += 1
        elif judged_by not in (None, entry.policy_name):
            result.others += 1
        elif entry.action == UNDECIDED:
            result.undecided += 1
        else:
            _compare(result, rules, measured_as, entry)
    return result


def _compare(result: Replayed, rules: Sequence[CompiledRule], measured_as: dict[str, str], entry: Recorded) -> None:
    found = {name: entry.score(name, digest) for name, digest in measured_as.items()}
    if missing := sorted(name for name, score in found.items() if score is None):
        result.incomplete += 1
        result.not_measured.update(missing)
        return
    decision = decide(rules, {name: score for name, score in found.items() if score is not None})
    result.compared += 1
    if decision.action == entry.action:
        result.unchanged[entry.action] += 1
        return
    change = result.changes.setdefault((entry.action, decision.action), Change(entry.action, decision.action))
    change.requests += 1
    change.rules[decision.rule or "no rule"] += 1
    if len(change.examples) < MAX_EXAMPLES:
        change.examples.append(entry.request_id)


def summary(result: Replayed) -> list[str]:
    """For people, one line each."""
    kept = ", ".join(f"{action} {count}" for action, count in sorted(result.unchanged.items())) or "none"
    lines = [
        f"{result.compared} requests compared, {result.changed()} change ({result.percent():.2f} %): "
        f"{result.changed('looser')} looser, {result.changed('stricter')} stricter; unchanged: {kept}"
    ]
    for change in sorted(result.changes.values(), key=lambda one: (not one.looser, -one.requests)):
        rules = ", ".join(f"{rule} {count}" for rule, count in change.rules.most_common())
        lines.append(
            f"  {change.before} -> {change.after}: {change.requests} ({rules}), such as {', '.join(change.examples)}"
        )
    if result.others:
        lines.append(f"  {result.others} requests were judged by other policies")
    if result.undecided:
        lines.append(f"  {result.undecided} requests ended before a decision")
    if result.incomplete:
        missing = ", ".join(f"{name} {count}" for name, count in result.not_measured.most_common())
        lines.append(f"  {result.incomplete} requests lack a score as this policy measures it: {missing}")
    if result.unreadable:
        lines.append(f"  {result.unreadable} lines are no entries")
    return lines


def _severity(action: str) -> int:
    return next((severity for name, severity in SEVERITY.items() if name == action), 0)
