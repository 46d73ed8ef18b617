"""``guard policy replay``: what a candidate policy would have decided on requests that a ledger has scores of.

Owns the comparison. Nothing is measured again: a request whose scores the candidate would have read otherwise is
counted apart, and never guessed, unless rules that can be judged settle what is done; of the others every rule that can
be judged is, by itself. What only a change of the candidate makes unknown is counted apart as well: at which times, and
with how much of it gone, an answer is judged, and what a model answers that is asked in another way. Of prompt and
answers the most severe decision is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from detectors.base import Score
from guard.policy.engine import CompiledRule, Decision, decide
from guard.policy.loading import LoadedPolicy, digests
from guard.policy.over_time import Outcome, Spread, decide_answer
from guard.policy.recorded import UNDECIDED, Recorded, RecordedAnswer
from guard.policy.schema import LATER, SEVERITY, Contract, Stage, detectors_in
from guard.policy.selection import PLAYGROUND
from guard.policy.waits import Waits, same_in_time, waits_of
from guard.policy.way import CHANGING, acting_in, way_of

FailOn = Literal["any", "looser", "stricter"]
MAX_EXAMPLES = 3

ANEW = ("retry", "route")
"""What asks for another answer."""

WITHOUT_ANSWER = ("refused", "guard_unavailable", "upstream_error", "upstream_unavailable", "internal_error")
"""Outcomes of requests that got no answer from the model, where the entry has none that was judged."""

IN_TIME = "whether scores of {} would have come in time"

NOT_JUDGED = ("/v1/embeddings", "/v1/rerank")
"""Routes without an answer in words."""


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
class RuleAlone:
    """A rule of the candidate on prompts of requests that could not be compared. ``hits``: by what was done at the
    time."""

    judged: int = 0
    hits: Counter[str] = field(default_factory=Counter)


@dataclass
class Replayed:
    """What came out. ``undecided``: requests that ended before a decision; ``incomplete``: those whose entry lacks a
    score that the candidate reads, by detector in ``not_measured``, or something else, in ``not_told``;
    ``otherwise``: how many of ``not_measured`` have a score under the detector's name that was measured in another way,
    ``unjudged``: of how many no rule judged the answer;
    ``never_measured``: detectors of enforced rules of which no line has a score; ``alone``: rules that could be judged
    on incomplete ones; ``outranked``: compared ones that lack a score which could not have changed the action;
    ``prompts_alone``: compared ones of which only the decision on the prompt is known, since it is another one;
    ``cut_short``: compared ones whose answer was blocked before its end, and would have gone on; ``not_judged``: what
    changes of the candidate make unknown, of how many requests; ``without_contract``: streams that might be among
    these, in lines that do not say what their policy said of streams; ``others``: those that another policy judged than
    the one asked for; ``playground``: runs of the console's, left out; ``unreadable``: lines that are no entry."""

    compared: int = 0
    unchanged: Counter[str] = field(default_factory=Counter)
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    undecided: int = 0
    not_measured: Counter[str] = field(default_factory=Counter)
    not_told: Counter[str] = field(default_factory=Counter)
    otherwise: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    never_measured: tuple[str, ...] = ()
    alone: dict[str, RuleAlone] = field(default_factory=dict)
    outranked: int = 0
    incomplete: int = 0
    prompts_alone: int = 0
    cut_short: int = 0
    not_judged: Counter[str] = field(default_factory=Counter)
    without_contract: int = 0
    others: int = 0
    playground: int = 0
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
            "measured_otherwise": dict(self.otherwise),
            "answers_unjudged": dict(self.unjudged),
            "never_measured": list(self.never_measured),
            "not_told": dict(self.not_told),
            "rules_alone": {name: {"judged": one.judged, "hits": dict(one.hits)} for name, one in self.alone.items()},
            "outranked": self.outranked,
            "incomplete": self.incomplete,
            "prompts_alone": self.prompts_alone,
            "cut_short": self.cut_short,
            "not_judged": dict(self.not_judged),
            "without_contract": self.without_contract,
            "others": self.others,
            "playground": self.playground,
            "unreadable": self.unreadable,
        }


@dataclass(frozen=True)
class _Candidate:
    """Rules, what the policy says of streams, and what the detectors that the rules of each stage read measure, by
    name. ``label``: its name and hash."""

    label: str
    contract: Contract
    waits: Waits
    rules: Sequence[CompiledRule]
    measured_as: Mapping[Stage, Mapping[str, str]]

    @property
    def judges_answers(self) -> bool:
        return any(one.rule.stage != "prompt" for one in self.rules)

    @property
    def detectors(self) -> dict[str, str]:
        return {name: digest for measured in self.measured_as.values() for name, digest in measured.items()}


class _NotToldError(Exception):
    """A request cannot be decided again. ``missing``: detectors that the ledger has no score of; the message says what
    else is missing. ``named``: those that have a score there, measured in another way; ``unjudged``: no rule judged the
    answer."""

    def __init__(
        self, reason: str = "", missing: Iterable[str] = (), *, named: Iterable[str] = (), unjudged: bool = False
    ) -> None:
        super().__init__(reason)
        self.missing, self.named, self.unjudged = sorted(missing), set(named), unjudged


class _NotJudgedError(Exception):
    """A request cannot be decided again, for what the candidate changes; the message says what is not known."""


def replay(
    loaded: LoadedPolicy,
    rules: Sequence[CompiledRule],
    entries: Iterable[Recorded | None],
    judged_by: str | None = None,
    *,
    playground: bool = False,
    files: Mapping[str, str | None] | None = None,
) -> Replayed:
    """Compare the recorded decisions, on prompts and answers, with the candidate's on the same scores. ``rules``: the
    candidate's, compiled.

    ``judged_by``: only requests that the policy of this name judged; ``playground``: with what somebody tried in the
    console; ``files``: as in ``digests``.
    """
    result = Replayed()
    measures = digests(loaded, files)
    stages: tuple[Stage, ...] = ("prompt", "stream", "output")
    read = {stage: {name for one in rules if one.rule.stage == stage for name in detectors_in(one.rule)}
            for stage in stages}  # fmt: skip
    candidate = _Candidate(
        loaded.label,
        loaded.policy.contract,
        waits_of(rules, loaded.policy.prompt_timeout_s),
        rules,
        {at: {name: measures[name] for name in names} for at, names in read.items()},
    )
    scored: set[str] = set()
    for entry in entries:
        if entry is None:
            result.unreadable += 1
        elif entry.assignment == PLAYGROUND and not playground:
            result.playground += 1
        elif judged_by not in (None, entry.policy_name):
            result.others += 1
        elif entry.action == UNDECIDED:
            result.undecided += 1
        else:
            scored |= _scored(candidate, entry)
            try:
                _compare(result, candidate, entry)
            except _NotToldError as why:
                result.incomplete += 1
                result.not_measured.update(why.missing)
                result.otherwise.update(name for name in why.missing if name in why.named)
                result.unjudged.update(why.missing if why.unjudged else [])
                result.not_told.update([str(why)] if str(why) else [])
            except _NotJudgedError as why:
                result.not_judged[str(why)] += 1
            _note_contract(result, candidate.contract, entry)
    enforced = {name for one in rules if one.mode == "enforce" for name in detectors_in(one.rule)}
    result.never_measured = tuple(sorted(enforced - scored))
    return result


def same_action(one: str, other: str) -> bool:
    """Whether after these decisions on a prompt the same is done to the request, as far as an action says so."""
    return one == other or {one, other} <= {"allow", "flag"}


def same_way(recorded: str | None, now: str, *, same_policy: bool, action: str) -> bool:
    """Whether two decisions of one ``action`` are carried out the same way. A line of an older version says of no way,
    but an unchanged policy has only one."""
    if same_policy:
        return True
    return recorded == now if recorded is not None else action not in CHANGING and not now


def _compare(result: Replayed, candidate: _Candidate, entry: Recorded) -> None:
    """Raises ``_NotToldError`` and ``_NotJudgedError``."""
    prompt = _of_prompt(result, candidate, entry)
    decisions, before = [prompt], [entry.action]
    judged = candidate.judges_answers and prompt.action != "block"
    same = same_action(entry.action, prompt.action)
    if same and not same_way(
        entry.way,
        way_of(candidate.rules, prompt),
        same_policy=entry.policy == candidate.label,
        action=prompt.action,
    ):
        why = _otherwise(candidate.rules, prompt)
        if judged or entry.answers:
            raise _NotJudgedError(why)
        result.not_judged[why] += 1
    if judged and not same:
        # Of the answer that would have come nothing is known; that the prompt's decision is another one is.
        result.prompts_alone += 1
    else:
        before += [entry.whole_action, *(one.action for one in entry.answers)]
        decisions += _of_answers(result, candidate, entry) if judged else []
    worst = max(decisions, key=lambda one: _severity(one.action))
    _count(result, max(before, key=_severity), worst, entry.request_id)


def _of_prompt(result: Replayed, candidate: _Candidate, entry: Recorded) -> Decision:
    """What the candidate decides on the prompt. Raises ``_NotToldError`` where a score is missing that could change
    what is done, and notes what the other rules say by themselves."""
    found = {name: entry.score(name, digest) for name, digest in candidate.measured_as["prompt"].items()}
    doubtful = _doubtful(candidate, entry, found)
    missing = {name for name, score in found.items() if score is None or name in doubtful}
    scores = {name: score for name, score in found.items() if score is not None and name not in doubtful}
    if not missing:
        return decide(candidate.rules, scores)
    here = [one for one in candidate.rules if one.rule.stage == "prompt"]
    judged = [one for one in here if missing.isdisjoint(detectors_in(one.rule))]
    decision = decide(judged, scores)
    if all(_changes_nothing(one, decision) for one in here if one not in judged):
        result.outranked += 1
        return decision
    for one in judged:
        alone = result.alone.setdefault(one.rule.name, RuleAlone())
        alone.judged += 1
        if one.verdict(scores).value:
            alone.hits[entry.action] += 1
    if doubtful == missing:
        raise _NotToldError(IN_TIME.format(", ".join(sorted(doubtful))))
    raise _NotToldError(missing=missing - doubtful, named=entry.scores)


def _doubtful(candidate: _Candidate, entry: Recorded, scores: Mapping[str, Score | None]) -> set[str]:
    """Detectors of which nobody knows whether they would have had these scores of the prompt in the time that the
    candidate gives them."""
    if entry.policy == candidate.label:
        return set()
    before = {} if entry.waits is None else entry.waits.prompt
    return {
        name
        for name, score in scores.items()
        if score is not None and not same_in_time(candidate.waits.prompt[name], before.get(name), entry.prompt_s, score)
    }


def _changes_nothing(one: CompiledRule, decision: Decision) -> bool:
    """Whether a decision's action is the same whatever this rule says."""
    rule, least = one.rule, max((hit.severity for hit in decision.hits if hit.mode == "enforce"), default=0)
    unknown = [SEVERITY[action] for action in (rule.on_error, rule.on_timeout) if action is not None]
    return one.mode == "shadow" or max(rule.rank, *unknown) < least


def _scored(candidate: _Candidate, entry: Recorded) -> set[str]:
    """Detectors of the candidate that the entry has a score of, of the prompt or of an answer."""
    return {
        name
        for name, digest in candidate.detectors.items()
        if entry.score(name, digest) is not None
        or any(answer.spread(name, digest, end=True) is not None for answer in entry.answers)
    }


def _note_contract(result: Replayed, contract: Contract, entry: Recorded) -> None:
    """Scores are those of whenever the answer was judged; when that is, and how much of it has left by then, goes by
    what the policy says of streams."""
    if not entry.streamed:
        return
    if entry.contract is None:
        result.without_contract += 1
        return
    changed = [f"{name} {before} -> {after}" for name, after in asdict(contract).items()
               if (before := getattr(entry.contract, name)) != after]  # fmt: skip
    if changed:
        result.not_judged[f"when streams are judged, and what leaves before a block: {', '.join(changed)}"] += 1


def _of_answers(result: Replayed, candidate: _Candidate, entry: Recorded) -> list[Decision]:
    """What the candidate decides on each answer, as long as it goes on as it went. Raises ``_NotToldError`` and
    ``_NotJudgedError``."""
    if not entry.answers:
        if entry.action == "block" or entry.outcome in WITHOUT_ANSWER or entry.route in NOT_JUDGED:
            return []
        missing = {name for stage in LATER for name in candidate.measured_as[stage]}
        raise _NotToldError(missing=missing, unjudged=True)
    if entry.streamed and any(one.complete is None for one in entry.answers):
        raise _NotToldError("lines of an older version, which has the first scores of a stream")
    if len(entry.answers) <= entry.attempts:
        raise _NotToldError("lines of an older version, which has only the last of several answers")
    decisions: list[Decision] = []
    attempts: Counter[str] = Counter()
    for i, answer in enumerate(entry.answers):
        spreads = _spreads(candidate, answer)
        _check_in_time(candidate, entry, *(one for one in spreads if one is not None))
        outcome = decide_answer(candidate.rules, *spreads)
        if outcome.unsure:
            raise _NotToldError(f"which scores met while the answer grew, for rule {outcome.unsure[0]}")
        _check_times(entry, answer, outcome)
        decision = outcome.decision
        if _is_cut(answer) and decision.action != "block" and outcome.outranking:
            result.cut_short += 1
        if again := decision.action in ANEW:
            # As often as its rule says; after that it is a block.
            again = decision.by is not None and attempts[decision.by.name] < decision.by.attempts
            attempts.update([decision.by.name] if decision.by is not None else [])
            decision = decision if again else replace(decision, action="block")
        decisions.append(decision)
        if answer.action != decision.action:
            break
        last = i + 1 == len(entry.answers)
        if not (last and again) and not same_way(
            answer.way, way_of((), decision), same_policy=entry.policy == candidate.label, action=decision.action
        ):
            if not last:
                raise _NotJudgedError(_otherwise((), decision))
            # What is done is known, and what the client gets instead of what was found is not the same.
            result.not_judged[_otherwise((), decision)] += 1
        if not again:
            break
    return decisions


def _check_in_time(candidate: _Candidate, entry: Recorded, *spreads: Mapping[str, Spread]) -> None:
    """Raises ``_NotToldError`` where nobody knows whether scores of an answer would have come in time."""
    if entry.policy == candidate.label:
        return
    before = {} if entry.waits is None else entry.waits.answer
    for spread in spreads:
        for name, one in spread.items():
            scores = [score for score in (one.lowest, one.highest, *one.without) if score is not None]
            if not same_in_time(candidate.waits.answer[name], before.get(name), entry.total_s, *scores):
                raise _NotToldError(IN_TIME.format(name))


def _check_times(entry: Recorded, answer: RecordedAnswer, outcome: Outcome) -> None:
    """Raises ``_NotJudgedError`` where rules that would decide look at times at which nobody did, or nothing came."""
    ends = [rule.name for rule in outcome.outranking if rule.stage == "output"]
    if _is_cut(answer) and outcome.decision.action != "block" and ends:
        raise _NotJudgedError(f"the end of answers that a block cut, for rule {ends[0]} of stage output")
    grows = [rule.name for rule in outcome.outranking if rule.stage == "stream"]
    if entry.streamed and answer.complete and answer.times == 1 and grows:
        raise _NotJudgedError(
            f"answers while they grew, that were judged at their end, for rule {grows[0]} of stage stream"
        )


def _otherwise(rules: Sequence[CompiledRule], decision: Decision) -> str:
    """What is not the same after the same action, and by which rules."""
    of_answer = decision.action == "block" or (not rules and decision.action not in ANEW)
    names = acting_in(rules, decision)
    by = f"rule {', '.join(names)}" if names else "without the gated steering"
    return f"another {'answer to the client' if of_answer else 'request to the model'} after the same action: " + (
        f"{decision.action}, {by}"
    )


def _is_cut(answer: RecordedAnswer) -> bool:
    return answer.complete is False and answer.action == "block"


def _spreads(candidate: _Candidate, answer: RecordedAnswer) -> tuple[dict[str, Spread], dict[str, Spread] | None]:
    """Those that the rules of both stages read. Raises ``_NotToldError``."""
    ended = answer.complete is not False
    read: dict[Stage, dict[str, Spread | None]] = {
        stage: {name: answer.spread(name, digest, end=stage == "output")
                for name, digest in candidate.measured_as[stage].items()}
        for stage in LATER
        if stage == "stream" or ended
    }  # fmt: skip
    if missing := {name for found in read.values() for name, one in found.items() if one is None}:
        raise _NotToldError(missing=missing, named=answer.end)
    told = {stage: {name: one for name, one in found.items() if one is not None} for stage, found in read.items()}
    return told["stream"], told.get("output")


def _count(result: Replayed, before: str, decision: Decision, request_id: str) -> None:
    result.compared += 1
    if decision.action == before:
        result.unchanged[before] += 1
        return
    change = result.changes.setdefault((before, decision.action), Change(before, decision.action))
    change.requests += 1
    change.rules[decision.rule or "no rule"] += 1
    if len(change.examples) < MAX_EXAMPLES:
        change.examples.append(request_id)


def _severity(action: str) -> int:
    return next((severity for name, severity in SEVERITY.items() if name == action), 0)
