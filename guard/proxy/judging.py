"""The policy's stages for answers: text and readouts of each choice to scores to one ruling, while an answer grows.

Owns what is known of one answer, and which of its characters a redaction takes out. Never acts on a ruling.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from detectors.base import Score
from guard.mia.results import Readouts
from guard.policy import Decision, Judges, Question, RuleHit
from guard.policy.judges import LATER
from guard.policy.schema import SEVERITY, Stage, detectors_in
from guard.proxy.readouts import most_complete
from guard.proxy.wire import Frame, Piece
from guard.telemetry.record import Answered

Unit = tuple[int, str]
"""A choice and a channel of it: each is a text of its own."""

WHOLE = " whole"
"""Ends the name of a channel's second copy, which some APIs send at its end."""

STREAM: tuple[Stage, ...] = ("stream",)


@dataclass(frozen=True)
class Mark:
    """Characters [start, end) of a text that are taken out, and what stands there instead."""

    start: int
    end: int
    replacement: str


@dataclass(frozen=True)
class Ruling:
    """``decision``: of all choices the most severe, with everything that hit."""

    choice: int
    scores: Mapping[str, Score]
    decision: Decision
    shadow: Decision | None


@dataclass
class AnswerJudge:
    """One answer. ``prompt``: readouts of its prompt as far as there are any; ``reason``: why there are none."""

    judges: Judges
    asked: Question
    prompt: Readouts | None
    reason: str
    texts: dict[Unit, str] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    marks: dict[Unit, list[Mark]] = field(default_factory=dict)
    ruling: Ruling | None = None
    _read: dict[Unit, tuple[str, dict[str, Score]]] = field(default_factory=dict)
    _replaced_at: dict[Unit, int] = field(default_factory=dict)

    @property
    def judges_streams(self) -> bool:
        """Whether there are rules to judge before the answer's end."""
        both = (self.judges.live, self.judges.shadow)
        return any(rule.rule.stage == "stream" for one in both if one for rule in one.rules)

    def add(self, frame: Frame) -> None:
        """The next part of the answer."""
        for piece in frame.pieces:
            unit = unit_of(piece)
            before = "" if piece.whole else self.texts.get(unit, "")
            frame.starts.append(len(before))
            self.texts[unit] = before + piece.text
            self.tokens[piece.choice] += piece.tokens
        if frame.choice is not None:
            frame.place = self.tokens[frame.choice]

    async def check(self, readouts: Sequence[Readouts] = (), *, complete: bool) -> Ruling:
        """Judge what there is so far. What hit before stays."""
        stages = LATER if complete else STREAM
        texts = await self._texts(stages)
        found = [self._judged(unit, texts.get(unit, {}), readouts, stages) for unit in self._units(readouts)]
        rulings = [*([self.ruling] if self.ruling else []), *found]
        worst = max(rulings, key=lambda one: _severity(one.decision))
        shadows = [one.shadow for one in rulings if one.shadow is not None]
        self.ruling = replace(
            worst,
            decision=_joined(worst.decision, [one.decision for one in rulings]),
            shadow=_joined(max(shadows, key=_severity), shadows) if shadows else None,
        )
        return self.ruling

    def answered(self, attempts: int) -> Answered | None:
        """What the record says of it."""
        one = self.ruling
        return Answered(one.choice, one.scores, one.decision, one.shadow, attempts) if one else None

    def redact(self, frame: Frame) -> None:
        """Take out of a frame what is marked there."""
        for piece, start in zip(frame.pieces, frame.starts, strict=True):
            unit = unit_of(piece)
            if piece.whole:
                self._replaced_at.pop(unit, None)
            if (marks := self.marks.get(unit)) and (text := self._without(unit, piece.text, start, marks)) is not None:
                piece.replace(text)
                frame.changed = True

    def _without(self, unit: Unit, text: str, start: int, marks: Sequence[Mark]) -> str | None:
        """The text, which begins at ``start`` of its unit, without what is marked; None when nothing of it is."""
        end, at, kept = start + len(text), start, []
        here = [mark for mark in marks if mark.start < end and mark.end > start]
        for mark in here:
            kept.append(text[at - start : max(at, mark.start) - start])
            if not mark.start <= self._replaced_at.get(unit, -1) < mark.end:
                kept.append(mark.replacement)
                self._replaced_at[unit] = max(mark.start, start)
            at = max(at, min(mark.end, end))
        return "".join(kept) + text[at - start :] if here else None

    def _units(self, readouts: Sequence[Readouts]) -> list[Unit]:
        """Texts, and choices without any; an answer without choices is judged as one."""
        choices = {choice for choice, _ in self.texts}
        silent = [
            (one.choice_index, "") for one in readouts if one.stage == "final" and one.choice_index not in choices
        ]
        return list(dict.fromkeys([*self.texts, *silent])) or [(0, "")]

    async def _texts(self, stages: Sequence[Stage]) -> dict[Unit, dict[str, Score]]:
        """Scores of detectors that read text: of every text that is new, in a thread, within a bounded time."""
        units = self.texts or {(0, ""): ""}
        late = self.judges.unread(stages, Score("unavailable", reason="the text was not read in time", timed_out=True))
        if not late:
            return {}
        try:
            async with asyncio.timeout(self.judges.live.answer_timeout_s):
                return await asyncio.to_thread(self._read_texts, dict(units), stages)
        except TimeoutError:
            return dict.fromkeys(units, late)

    def _read_texts(self, units: Mapping[Unit, str], stages: Sequence[Stage]) -> dict[Unit, dict[str, Score]]:
        for unit, text in units.items():
            known = self._read.get(unit)
            if (
                known is None
                or known[0] != text
                or not known[1].keys() >= self.judges.unread(stages, Score("scored")).keys()
            ):
                self._read[unit] = (text, self.judges.read_answer(text, stages))
        return {unit: self._read[unit][1] for unit in units}

    def _judged(
        self, unit: Unit, texts: Mapping[str, Score], readouts: Sequence[Readouts], stages: Sequence[Stage]
    ) -> Ruling:
        prompts = [self.prompt] if self.prompt else [one for one in readouts if one.stage == "prompt"]
        items = dict(most_complete(prompts).items) if prompts else {}
        for one in readouts:
            items |= one.items if one.stage == "final" and one.choice_index == unit[0] else {}
        found = Readouts(items) if items else None
        reason = self.reason or "the engine sent no readouts of the answer"
        scores = self.judges.scores(self.asked, found, reason, texts=texts, stages=stages)
        both = [self.judges.decide(scores, stage) for stage in stages]
        live = [one for one, _ in both]
        shadows = [one for _, one in both if one is not None]
        decision = _joined(max(live, key=_severity), live)
        self.marks[unit] = self._marks(decision, scores.live)
        shadow = _joined(max(shadows, key=_severity), shadows) if shadows else None
        return Ruling(unit[0], scores.live, decision, shadow)

    def _marks(self, decision: Decision, scores: Mapping[str, Score]) -> list[Mark]:
        found = []
        for hit in decision.hits:
            if hit.mode == "enforce" and hit.action == "redact" and not hit.on_error:
                rule = self.judges.live.rule(hit.rule)
                assert rule.redact is not None
                names = detectors_in(rule)
                spans = [span for name in names if name in scores for span in scores[name].spans]
                found += [Mark(a, b, rule.redact.replacement) for a, b in spans or [(0, 1 << 62)] if a < b]
        return _merged(found)


def unit_of(piece: Piece) -> Unit:
    return piece.choice, piece.channel + (WHOLE if piece.whole else "")


def _merged(marks: Iterable[Mark]) -> list[Mark]:
    """In order, with those that overlap as one."""
    merged: list[Mark] = []
    for mark in sorted(marks, key=lambda one: (one.start, one.end)):
        if merged and mark.start < merged[-1].end:
            merged[-1] = replace(merged[-1], end=max(mark.end, merged[-1].end))
        else:
            merged.append(mark)
    return merged


def _severity(decision: Decision) -> int:
    return max((hit.severity for hit in decision.hits if hit.mode == "enforce"), default=0)


def _joined(decisive: Decision, decisions: Sequence[Decision]) -> Decision:
    """``decisive`` with the hits of all, each rule once, as it hit worst."""
    hits: dict[str, RuleHit] = {}
    for hit in (hit for one in (decisive, *decisions) for hit in one.hits):
        if hit.rule not in hits or hits[hit.rule].severity < hit.severity:
            hits[hit.rule] = hit
    flags = tuple(dict.fromkeys(name for one in (decisive, *decisions) for name in one.flags))
    would = max(decisions, key=lambda one: SEVERITY[one.would]).would
    return replace(decisive, hits=tuple(hits.values()), flags=flags, would=would)
