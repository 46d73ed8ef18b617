"""``guard policy explain`` as a whole: what was recorded, then prompt and answers as a policy's rules see them.

Owns which scores these are: those of a ledger's entry, and those that were given by hand, which count before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from detectors.base import Score
from guard.policy.engine import CompiledRule, decide
from guard.policy.explain import explain, explain_answer, explain_record, explain_together
from guard.policy.loading import LoadedPolicy, digests
from guard.policy.over_time import Spread
from guard.policy.recorded import Recorded, RecordedAnswer
from guard.policy.replay import same_action, same_way
from guard.policy.schema import Stage, detectors_in
from guard.policy.way import way_of

MISSING = Score("unavailable", reason="the ledger has no score of this measurement")


def explained(
    loaded: LoadedPolicy, rules: Sequence[CompiledRule], entry: Recorded | None, given: Mapping[str, Score]
) -> list[str]:
    """Lines for people. Without an ``entry`` the scores ``given`` are those of the prompt and of its answer."""
    measured_as = digests(loaded)
    of_answers = names_in(rules, "stream") | names_in(rules, "output")
    told = explain_record(entry) if entry is not None else []
    scores = _of_prompt(measured_as, entry, of_answers - names_in(rules, "prompt")) | dict(given)
    judged = explain(rules, scores)
    if not of_answers:
        return told + judged
    prompt = decide(rules, scores)
    told += [f"decision on the prompt:{one.removeprefix('decision:')}" if one.startswith("decision:") else one
             for one in judged]  # fmt: skip
    by_hand = {name: Spread().also(score) for name, score in given.items()}
    if entry is None:
        lines, outcome = explain_answer(rules, by_hand, by_hand)
        return [*told, "the answer:", *lines, explain_together(prompt, [outcome.decision])]
    if not entry.answers:
        return [*told, "the answer: the ledger has nothing of it, or there was none", explain_together(prompt, [])]
    now, same = way_of(rules, prompt), entry.policy == loaded.label
    if not same_action(entry.action, prompt.action) or not same_way(
        entry.way, now, same_policy=same, action=prompt.action
    ):
        told.append("note: with this decision on the prompt another answer would have come, or none")
    if entry.streamed and entry.answers[-1].complete is None:
        told.append("note: an older version wrote this line, with the answer's first scores and not its highest")
    decisions = []
    for i, answer in enumerate(entry.answers):
        end = None if answer.complete is False else _of_answer(measured_as, answer, of_answers, end=True) | by_hand
        lines, outcome = explain_answer(rules, _of_answer(measured_as, answer, of_answers, end=False) | by_hand, end)
        told += [f"answer {i + 1} of {len(entry.answers)}:" if len(entry.answers) > 1 else "the answer:", *lines]
        decisions.append(outcome.decision)
    return [*told, explain_together(prompt, decisions)]


def names_in(rules: Sequence[CompiledRule], stage: Stage) -> set[str]:
    """Detectors that the rules of a stage read."""
    return {name for one in rules if one.rule.stage == stage for name in detectors_in(one.rule)}


def _of_prompt(measured_as: Mapping[str, str], entry: Recorded | None, later: set[str]) -> dict[str, Score]:
    """``later``: detectors that only rules for answers read; of a prompt they may have nothing."""
    if entry is None:
        return {}
    found = {name: entry.score(name, digest) for name, digest in measured_as.items()}
    return {name: score or MISSING for name, score in found.items() if score is not None or name not in later}


def _of_answer(
    measured_as: Mapping[str, str], answer: RecordedAnswer, names: set[str], *, end: bool
) -> dict[str, Spread]:
    found = {name: answer.spread(name, digest, end=end) for name, digest in measured_as.items() if name in names}
    return {name: one or Spread().also(MISSING) for name, one in found.items()}
