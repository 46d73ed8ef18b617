"""A detector's scores of one answer: of each of its texts, and at each time that it was judged while it grew.

Owns what is kept of them, what can be told from that about a rule that may hit at any time, and what cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf, nextafter, prod

from detectors.base import Score
from guard.policy.engine import NO_SCORE, CompiledRule, Decision, RuleHit, decision_of
from guard.policy.schema import LATER, SEVERITY, Rule, detectors_in

MAX_COMBINATIONS = 4096
"""Most ways in which scores can have met that are looked through for one rule."""


@dataclass(frozen=True)
class Spread:
    """``lowest``, ``highest``: of the scores there were; None without any. ``without``: what stood there instead at
    other times or for other texts, each once."""

    lowest: Score | None = None
    highest: Score | None = None
    without: tuple[Score, ...] = ()

    def also(self, score: Score) -> Spread:
        """With one more. Of equal ones the later is kept: it is of more of the answer."""
        if score.status != "scored" or score.value is None:
            return replace(self, without=(*(one for one in self.without if one != score), score))
        lowest = score if self.lowest is None or score.value <= _value(self.lowest) else self.lowest
        highest = score if self.highest is None or score.value >= _value(self.highest) else self.highest
        return replace(self, lowest=lowest, highest=highest)

    @property
    def counts(self) -> Score:
        """What is told where one score has to do: the highest; without any, that it could not be measured rather than
        that there was nothing to measure yet."""
        return self.highest or max(self.without, key=lambda one: one.status == "unavailable", default=NO_SCORE)

    @property
    def seen(self) -> tuple[Score, ...]:
        """Those that there were for sure, with different values."""
        ends = [one for one in (self.highest, self.lowest) if one is not None]
        differ = len(ends) == 2 and ends[0].value != ends[1].value
        return (*(ends if differ else ends[:1]), *self.without)


@dataclass
class Seen:
    """What detectors said of one answer. ``whole``: all of it, ``end``: the last time that it was judged; ``times``:
    how often it was."""

    times: int = 0
    whole: dict[str, Spread] = field(default_factory=dict)
    end: dict[str, Spread] = field(default_factory=dict)

    def add(self, texts: Sequence[Mapping[str, Score]]) -> None:
        """Once judged; the scores of each of its texts."""
        self.times += 1
        self.end = {}
        for name, score in ((name, score) for scores in texts for name, score in scores.items()):
            self.end[name] = self.end.get(name, Spread()).also(score)
            self.whole[name] = self.whole.get(name, Spread()).also(score)

    def scores(self, hit: Collection[str]) -> dict[str, Score]:
        """One a detector, as ``Spread.counts``; but one that could not be measured in the end is no clean one. hit:
        those that a rule hit on before that."""

        def counts(name: str) -> Score:
            lost = name in self.end and self.end[name].counts.status == "unavailable"
            return self.end[name].counts if lost and name not in hit else self.whole[name].counts

        return {name: counts(name) for name in self.whole}


@dataclass(frozen=True)
class Outcome:
    """``decision``: by what hit for sure. ``unsure``: rules that may have hit as well and would have decided.
    ``outranking``: enforced rules, of either stage, judged or not, that could decide if they hit."""

    decision: Decision
    unsure: tuple[str, ...]
    outranking: tuple[Rule, ...] = ()


def decide_answer(
    rules: Iterable[CompiledRule], whole: Mapping[str, Spread], end: Mapping[str, Spread] | None
) -> Outcome:
    """What rules of the stages ``stream`` and ``output`` make of an answer. ``whole``: by detector, over all the times
    that it was judged; ``end``: at its end, None where it was not judged to its end."""
    rules = list(rules)
    here = [one for stage in LATER for one in rules if one.rule.stage == stage]
    if end is None:
        here = [one for one in here if one.rule.stage != "output"]
    hits: list[RuleHit] = []
    possible: dict[str, int] = {}
    for one in here:
        sure, worst = hit_over_time(one, whole if one.rule.stage == "stream" or end is None else end)
        hits += [sure] if sure is not None else []
        if one.mode == "enforce":
            possible[one.rule.name] = worst
    decided = max((hit.severity for hit in hits if hit.mode == "enforce"), default=SEVERITY["allow"])
    unsure = tuple(name for name, worst in possible.items() if worst > decided)
    outranking = tuple(one.rule for one in rules if one.mode == "enforce" and one.rule.stage in LATER
                       and max(one.rule.rank, *_of_unknown(one)) > decided)  # fmt: skip
    return Outcome(decision_of(here, hits), unsure, outranking)


def hit_over_time(one: CompiledRule, spreads: Mapping[str, Spread]) -> tuple[RuleHit | None, int]:
    """The worst that a rule came to for sure, and how severe the worst is that it may have come to.

    What was between lowest and highest is not known, nor which scores of several detectors met: a rule that needs one
    of these to hit has not for sure."""
    names = list(dict.fromkeys(detectors_in(one.rule)))
    seen = [spreads[name].seen if name in spreads else (NO_SCORE,) for name in names]
    values = [
        (*here, *(_between(one, name, spreads[name]) if name in spreads else ()))
        for name, here in zip(names, seen, strict=True)
    ]
    if prod(map(len, values)) > MAX_COMBINATIONS:
        return None, max(one.rule.rank, *_of_unknown(one))
    ways = [(way, one.hit(dict(zip(names, way, strict=True)))) for way in product(*values)]
    # What was seen of one detector was there with something of the others, whatever that was.
    sure = [
        min((hit for way, hit in ways if way[i] is score), key=_severity)
        for i, scores in enumerate(seen)
        for score in scores
    ]
    worst = max((hit for _, hit in ways), key=_severity)
    return (max(sure, key=_severity) if sure else worst), _severity(worst)


def _of_unknown(one: CompiledRule) -> tuple[int, ...]:
    """How severe it is when it cannot be judged."""
    return tuple(SEVERITY[one.on_unknown(late)[1]] for late in (False, True))


def _between(one: CompiledRule, name: str, spread: Spread) -> list[Score]:
    """Scores that it may have had: at each number that the rule compares it with, and just below."""
    if spread.lowest is None or spread.highest is None:
        return []
    low, high = _value(spread.lowest), _value(spread.highest)
    near = [value for of, _, bound in one.bounds if of == name for value in (bound, nextafter(bound, -inf))]
    return [Score("scored", value) for value in dict.fromkeys(near) if low < value < high]


def _severity(hit: RuleHit | None) -> int:
    return -1 if hit is None else hit.severity


def _value(score: Score) -> float:
    assert score.value is not None, "it is scored"
    return score.value
