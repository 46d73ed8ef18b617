"""How long a policy waits for the scores of each detector: what else than scores decides which of them there are.

Owns working it out from rules. A detector that several rules read is waited for as long as the most patient of them
does, unless a rule that blocks when it is late ends the wait for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from detectors.base import Score
from guard.policy.engine import CompiledRule, longest_wait_s
from guard.policy.schema import LATER, Stage, detectors_in


@dataclass(frozen=True)
class Waits:
    """Seconds, by detector, for scores of a prompt and for one look at an answer."""

    prompt: Mapping[str, float] = field(default_factory=dict)
    answer: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def json(self) -> dict[str, dict[str, float]]:
        """The same of every request that a policy judges."""
        return asdict(self)


def waits_of(rules: Sequence[CompiledRule], timeout_s: float) -> Waits:
    """``timeout_s``: of rules that say none."""
    stages: tuple[Stage, ...] = ("prompt", *LATER)
    by_stage = {stage: _of_stage(rules, timeout_s, stage) for stage in stages}
    answer: dict[str, float] = {}
    for stage in LATER:
        for name, wait_s in by_stage[stage].items():
            answer[name] = max(wait_s, answer.get(name, 0.0))
    return Waits(by_stage["prompt"], answer)


def _of_stage(rules: Sequence[CompiledRule], timeout_s: float, stage: Stage) -> dict[str, float]:
    # Where nobody acts on a score, it is worth recording all the same.
    whole_s = longest_wait_s(rules, timeout_s, stage) or timeout_s
    found: dict[str, float] = {}
    for one in rules:
        if one.rule.stage == stage:
            for name in detectors_in(one.rule):
                found[name] = max(min(whole_s, one.rule.timeout_s or timeout_s), found.get(name, 0.0))
    return found


def same_in_time(now_s: float, before_s: float | None, took_s: float | None, *scores: Score) -> bool:
    """Whether a wait of ``now_s`` seconds in place of ``before_s`` brings the same scores. ``took_s``: how long it
    took at most until they were there, or the wait was over. None: not known."""
    if before_s == now_s:
        return True
    for score in scores:
        if score.status == "scored" and not (_within(before_s, now_s) or _within(took_s, now_s)):
            return False
        # What was late after a longer wait is so after a shorter one.
        if score.timed_out and not (_within(now_s, before_s) or (before_s is None and _within(now_s, took_s))):
            return False
    return True


def _within(one_s: float | None, other_s: float | None) -> bool:
    return one_s is not None and other_s is not None and one_s <= other_s
