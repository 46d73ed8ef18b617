"""``guard policy test``: tables of scores and the decisions that a policy must come to, in YAML beside it.

Owns the file ``NAME.tests.yaml`` and running it. Needs no model: the file says what the named thresholds are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from detectors.base import Score
from detectors.registry import READ_THE_END
from guard.policy.compiled import Thresholds, compile_rules
from guard.policy.conditions import DetectorName, NoTruth, Section, Version
from guard.policy.conversation import ends_behind_others, matches
from guard.policy.engine import CompiledRule, decide
from guard.policy.loading import LoadedPolicy, load_policy
from guard.policy.measuring import BEHIND_OTHERS, OUT_OF_SCOPE, at_least
from guard.policy.policy_set import TESTS_SUFFIX
from guard.policy.schema import Action, DetectorUse, RuleName, Stage
from guard.policy.yaml_file import PolicyError, locate, message_at, read_mapping, validated

NoScore = Literal["unavailable", "timeout", "not_applicable"]
NO_SCORES: dict[str, Score] = {
    "unavailable": Score("unavailable", reason="given"),
    "timeout": Score("unavailable", reason="given", timed_out=True),
    "not_applicable": Score("not_applicable", reason="given"),
}


class Expectation(Section):
    """What the decision must be. Fields that are not given may be anything."""

    action: Action
    """What is done."""

    rule: RuleName | None = None
    """The rule that decides."""

    flags: tuple[RuleName, ...] | None = None
    """All enforced rules that flag."""

    would: Action | None = None
    """The action if rules in shadow mode were enforced too."""


class Case(Section):
    """One row of the table."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    """A sentence about behaviour."""

    scores: dict[DetectorName, Annotated[float | NoScore | str, NoTruth]] = {}  # noqa: RUF012 - pydantic copies it
    """Detector to its score: a number, the name of a threshold (a score just there), or `unavailable`, `timeout`,
    `not_applicable`. A detector that is not named is unavailable."""

    roles: tuple[str, ...] = ()
    """The messages' roles, where they matter: a detector out of its `scope` is not applicable, whatever its score here;
    behind the assistant's or the system's last message the score of a `probe`, an `attention_tracker` or a
    `tool_call_risk` is one that may be higher, as for requests. Default: every detector applies, and sees all."""

    stage: Stage = "prompt"
    """Which rules are judged."""

    expect: Expectation | Action
    """The decision; a word alone is the action."""

    @property
    def expected(self) -> Expectation:
        return self.expect if isinstance(self.expect, Expectation) else Expectation(action=self.expect)


class Cases(Section):
    """A file of tests."""

    version: Version
    """Version of this format."""

    policy: str | None = None
    """The policy, relative to this file. Default: `NAME.yaml` for `NAME.tests.yaml`."""

    thresholds: dict[DetectorName, dict[str, Annotated[float, NoTruth]]] = {}  # noqa: RUF012 - pydantic copies it
    """Detector to the numbers that the tests take for its named thresholds, so that they hold for any calibration."""

    tests: tuple[Case, ...]
    """Rows."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        if not self.tests:
            raise ValueError("has no tests")
        names = [case.name for case in self.tests]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"tests share a name: {', '.join(twice)}")
        return self


@dataclass(frozen=True)
class Outcome:
    """``failure``: what differs, None when nothing does. ``line``: of the test in its file."""

    case: str
    line: int
    failure: str | None


@dataclass(frozen=True)
class Report:
    """``untested``: rules that no test makes hit, by a condition that is true."""

    path: Path
    policy: str
    outcomes: tuple[Outcome, ...]
    untested: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return all(outcome.failure is None for outcome in self.outcomes)


def cases_beside(policy: Path) -> Path:
    """Where a policy's tests lie."""
    return policy.with_name(policy.stem + TESTS_SUFFIX)


def run_cases(path: Path) -> Report:
    """Run one file of tests. Raises ``PolicyError`` for a file, or its policy, that cannot be used."""
    root = read_mapping(path)
    cases = validated(root, Cases)
    named = cases.policy or path.name.removesuffix(TESTS_SUFFIX) + ".yaml"
    loaded = load_policy(path.parent / named)
    if unknown := sorted(cases.thresholds.keys() - loaded.policy.detectors.keys()):
        raise PolicyError(message_at(root, ("thresholds", unknown[0]), _no_such(unknown[0], loaded)))
    rules = compile_rules(loaded, cases.thresholds)
    outcomes, hit = [], set[str]()
    for i, case in enumerate(cases.tests):
        at = ("tests", i)
        try:
            scores = _scores(case, loaded, cases.thresholds)
        except ValueError as error:
            raise PolicyError(message_at(root, (*at, "scores"), str(error))) from None
        failure = _failure(case, rules, scores)
        hit |= {one.rule for one in decide(rules, scores, case.stage).hits if not one.on_error}
        outcomes.append(Outcome(case.name, locate(root, at).line, failure))
    untested = tuple(one.rule.name for one in rules if one.check is not None and one.rule.name not in hit)
    return Report(path, loaded.label, tuple(outcomes), untested)


def _scores(case: Case, loaded: LoadedPolicy, thresholds: Thresholds) -> dict[str, Score]:
    uses = loaded.policy.detectors
    if unknown := sorted(case.scores.keys() - uses.keys()):
        raise ValueError(_no_such(unknown[0], loaded))
    found = {name: _score(value, thresholds.get(name, {})) for name, value in case.scores.items()}
    if case.stage == "prompt" and ends_behind_others(case.roles):
        found = {name: at_least(one, BEHIND_OTHERS) if _reads_end(name, uses) else one for name, one in found.items()}
    out = {
        name: Score("not_applicable", reason=OUT_OF_SCOPE)
        for name, use in uses.items()
        if case.roles and use.scope and not matches(use.scope, case.roles)
    }
    return found | out


def _reads_end(name: str, uses: Mapping[str, DetectorUse]) -> bool:
    """Also what combines scores of such detectors."""
    use = uses[name]
    return use.kind in READ_THE_END or any(_reads_end(one, uses) for one in use.inputs.values())


def _no_such(name: str, loaded: LoadedPolicy) -> str:
    return f"the policy has no detector {name!r}; it has {', '.join(loaded.policy.detectors) or 'none'}"


def _score(value: float | str, thresholds: Mapping[str, float]) -> Score:
    if isinstance(value, float):
        return Score("scored", value)
    if value in NO_SCORES:
        return NO_SCORES[value]
    if value not in thresholds:
        raise ValueError(f"{value!r} is neither a number nor a threshold of this file; use {', '.join(NO_SCORES)}")
    return Score("scored", thresholds[value])


def _failure(case: Case, rules: Sequence[CompiledRule], scores: Mapping[str, Score]) -> str | None:
    decision, expected = decide(rules, scores, case.stage), case.expected
    wrong = [
        f"{field} is {found}, not {wanted}"
        for field, wanted, found in (
            ("action", expected.action, decision.action),
            ("rule", expected.rule, decision.rule),
            ("flags", expected.flags, decision.flags),
            ("would", expected.would, decision.would),
        )
        if wanted is not None and wanted != found
    ]
    return f"{'; '.join(wrong)} ({decision.reason})" if wrong else None
