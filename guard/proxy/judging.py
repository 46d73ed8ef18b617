"""The policy's stages for answers: text and readouts of each choice to scores to one ruling, while an answer grows.

Owns what is known of one answer, and which of its characters a redaction takes out. Never acts on a ruling.
"""

from __future__ import annotations

import asyncio
import copy
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from detectors.base import Score, SecondPass
from guard.mia.results import Readouts, join
from guard.policy import BoundPolicy, Decision, Judges, Question, RuleHit
from guard.policy.judges import STREAM
from guard.policy.measuring import NOT_YET, Measurement, Part
from guard.policy.over_time import Seen
from guard.policy.schema import LATER, SEVERITY, Stage, detectors_in
from guard.proxy.client_threads import TextThreads
from guard.proxy.errors import ApiError
from guard.proxy.readouts import most_complete
from guard.proxy.second_pass import PassReader, SecondPassError, spec_of
from guard.proxy.text_reading import LATE, PENDING, Reader, Reading, read_by_each
from guard.proxy.wire import Frame, Piece
from guard.telemetry.record import Answered, Moment

Unit = tuple[int, str]
"""A choice and a channel of it: each is a text of its own."""

NOWHERE: Unit = (-1, "")
"""No unit of any answer."""

WHOLE = " whole"
"""In the name of a channel's second copy, which some APIs send at its end; a number behind it tells several apart."""

MAX_MOMENTS = 128
"""Longest course of a stream's scores that is kept; from there on every second moment of it is forgotten."""

UNREAD = ("", Score("not_applicable", reason="nothing of the answer has been read yet"))
NO_WORDS = Score("not_applicable", reason="the answer says nothing in words")
PASS_LATE = Score("unavailable", reason="the second pass did not come in time", timed_out=True)


@dataclass(frozen=True)
class Conversation:
    """What the answer is an answer to, for detectors that have the model read more. ``words``: as a ``Form``'s."""

    parts: Sequence[Part] = ()
    roles: Sequence[str] = ()
    words: Callable[[str], bool] = lambda _channel: True
    reader: PassReader | None = None


@dataclass(frozen=True)
class Mark:
    """Characters [start, end) of a text that are taken out, and what stands there instead."""

    start: int
    end: int
    replacement: str


@dataclass(frozen=True)
class Ruling:
    """``decision``: of all choices the most severe, with everything that hit. scores: of the text that decided, when it
    did; ``beside``: of the shadow policy's detectors."""

    choice: int
    scores: Mapping[str, Score]
    decision: Decision
    shadow: Decision | None
    beside: Mapping[str, Score] = field(default_factory=dict)


@dataclass
class _Kept:
    """What one policy's detectors said of an answer. ``met``: by rule that hit, how severely and on which scores: the
    first time that it hit worst, as in ``joined``."""

    seen: Seen = field(default_factory=Seen)
    met: dict[str, tuple[int, Mapping[str, Score]]] = field(default_factory=dict)

    def add(self, texts: Sequence[tuple[Mapping[str, Score], Decision]]) -> None:
        """Once judged; scores of each text and what they came to."""
        self.seen.add([scores for scores, _ in texts])
        for scores, decision in texts:
            for hit in decision.hits:
                if hit.rule not in self.met or self.met[hit.rule][0] < hit.severity:
                    self.met[hit.rule] = (hit.severity, scores)

    def answered(
        self, choice: int, decision: Decision, policy: BoundPolicy, attempts: int, *, complete: bool
    ) -> Answered:
        hits = [policy.rule(hit.rule) for hit in decision.hits if not hit.on_error]
        scores = self.seen.scores({name for rule in hits for name in detectors_in(rule)})
        met = {rule: on for rule, (_, on) in self.met.items()}
        return Answered(
            choice,
            scores,
            decision,
            shadow=None,
            attempts=attempts,
            complete=complete,
            times=self.seen.times,
            whole=dict(self.seen.whole),
            end=self.seen.end,
            met=met,
        )


_Before = tuple[tuple[_Kept, _Kept], list[Moment], Ruling | None]
"""What was known of an answer before it was judged at its end."""


@dataclass
class AnswerJudge:
    """One answer. ``prompt``: readouts of its prompt as far as there are any; ``reason``: why there are none;
    ``complete``: it was judged to its end; ``threads``: where its texts are read."""

    judges: Judges
    asked: Question
    prompt: Readouts | None
    reason: str
    threads: TextThreads
    conversation: Conversation = field(default_factory=Conversation)
    texts: dict[Unit, str] = field(default_factory=dict)
    tokens: Counter[int] = field(default_factory=Counter)
    ruling: Ruling | None = None
    second_pass_s: float | None = None
    course: list[Moment] = field(default_factory=list)
    complete: bool = False
    _answered: Answered | None = None
    _live: _Kept = field(default_factory=_Kept)
    _beside: _Kept = field(default_factory=_Kept)
    _grown: dict[int, Readouts] = field(default_factory=dict)
    _rulings: dict[Unit, tuple[Decision, Mapping[str, Score]]] = field(default_factory=dict)
    _marked: dict[Unit, list[Mark]] = field(default_factory=dict)
    _taken: int = 0
    _read: dict[tuple[Unit, str], tuple[str, Score]] = field(default_factory=dict)
    _units_read: list[Unit] = field(default_factory=list)
    _reading: Reading = field(default_factory=lambda: Reading([]))
    _passing: dict[tuple[str, str], asyncio.Task[Score]] = field(default_factory=dict)
    _passed: dict[Unit, dict[str, Score]] = field(default_factory=dict)
    _settle: Callable[[], None] | None = None
    _readouts: Sequence[Readouts] = ()
    _unjudged: bool = False
    _copies: dict[Unit, dict[str, Unit]] = field(default_factory=dict)
    _replaced_at: dict[Unit, int] = field(default_factory=dict)

    @property
    def judges_streams(self) -> bool:
        """Whether there are rules to judge before the answer's end."""
        both = (self.judges.live, self.judges.shadow)
        return any(rule.rule.stage == "stream" for one in both if one for rule in one.rules)

    def add(self, frame: Frame) -> None:
        """The next part of the answer."""
        self._unjudged = True
        for piece in frame.pieces:
            text = piece.text
            unit = self._copy(unit_of(piece), text) if piece.whole else unit_of(piece)
            before = "" if piece.whole else self.texts.get(unit, "")
            frame.units.append(unit)
            frame.starts.append(len(before))
            self.texts[unit] = before + text
            self.tokens[piece.choice] += piece.tokens
        if frame.choice is not None:
            frame.place = self.tokens[frame.choice]

    def _copy(self, unit: Unit, text: str) -> Unit:
        """The unit of a text that comes whole. It may come several times, each spelt in its own way: each spelling is
        a text of its own, as what is found in one stands elsewhere in another."""
        copies = self._copies.setdefault(unit, {})
        choice, channel = unit
        return copies.setdefault(text, (choice, f"{channel}{len(copies)}") if copies else unit)

    async def check(self, readouts: Sequence[Readouts] = (), *, complete: bool) -> Ruling:
        """Judge what there is so far. What hit before stays."""
        self._answered, self._readouts = None, readouts
        stages = LATER if complete else STREAM
        texts = await self._texts(stages, complete=complete)
        passes = await self._passes() if complete else {}
        self._take(readouts)
        if complete and (self._reading.under_way or self._passing):
            before = copy.deepcopy((self._live, self._beside)), [*self.course], self.ruling
            self._settle = partial(self._judge_again, before, readouts)
        return self._rule(texts, passes, readouts, stages, complete=complete)

    async def settle(self, limit_s: float) -> bool:
        """Wait so long for what was not waited for, and judge once more with what has come. Whether there was any.
        A stream whose client left while its last part was being judged is judged that far."""
        if self._unjudged and self.judges_streams and limit_s > 0:
            with suppress(TimeoutError, ApiError):
                async with asyncio.timeout(limit_s):
                    await self.check(self._readouts, complete=False)
        settle, self._settle = self._settle, None
        if settle is None:
            self._reading.stop()
            return not self.complete
        try:
            both = (self._reading.settle(limit_s), _ended([*self._passing.values()], limit_s))
            await asyncio.gather(*both)
        finally:
            self._reading.stop()
            settle()
        return True

    def _judge_again(self, before: _Before, readouts: Sequence[Readouts]) -> None:
        (self._live, self._beside), self.course[:], self.ruling = before
        self._answered = None
        scores = {key: _result(task) for key, task in self._passing.items()}
        passes = {
            unit: {**known, **{key: score for (key, text), score in scores.items() if text == self.texts.get(unit)}}
            for unit, known in self._passed.items()
        }
        self._rule(self._scores_of_texts(), passes, readouts, LATER, complete=True)

    def _rule(
        self,
        texts: Mapping[Unit, Mapping[str, Score]],
        passes: Mapping[Unit, Mapping[str, Score]],
        readouts: Sequence[Readouts],
        stages: Sequence[Stage],
        *,
        complete: bool,
    ) -> Ruling:
        found = []
        for unit in self._units(readouts):
            known = {**texts.get(unit, {}), **passes.get(unit, passes.get(NOWHERE, {}))}
            found.append(self._judged(unit, known, readouts, stages))
        self.complete, self._unjudged = complete, False
        self._note(found)
        rulings = [*([self.ruling] if self.ruling else []), *found]
        worst = max(rulings, key=lambda one: severity_of(one.decision))
        shadows = [one.shadow for one in rulings if one.shadow is not None]
        self.ruling = replace(
            worst,
            decision=joined(worst.decision, [one.decision for one in rulings]),
            shadow=joined(max(shadows, key=severity_of), shadows) if shadows else None,
        )
        return self.ruling

    def _note(self, found: Sequence[Ruling]) -> None:
        """Put the scores of this moment to those before, and to the answer's course."""
        self._live.add([(one.scores, one.decision) for one in found])
        self._beside.add([(one.beside, one.shadow) for one in found if one.shadow is not None])
        if not self.judges_streams:
            return
        names = dict.fromkeys(name for one in found for name in one.scores)
        values = {name: [one.scores[name].value for one in found if name in one.scores] for name in names}
        worst = {
            name: max((value for value in given if value is not None), default=None) for name, given in values.items()
        }
        self.course.append(Moment(max(self.tokens.values(), default=0), worst))
        if len(self.course) > MAX_MOMENTS:
            del self.course[1::2]

    def answered(self, attempts: int) -> Answered | None:
        """What the record says of it, ``attempts`` answers having been generated before: of one answer always as many.
        Worked out once until the next ``check``."""
        one, shadow = self.ruling, self.judges.shadow
        if one is None or self._answered is not None:
            return self._answered
        beside = None
        if one.shadow is not None and shadow is not None and shadow.rules_of_answers:
            beside = self._beside.answered(one.choice, one.shadow, shadow, attempts, complete=self.complete)
        answered = self._live.answered(one.choice, one.decision, self.judges.live, attempts, complete=self.complete)
        self._answered = replace(answered, shadow=beside, second_pass_s=self.second_pass_s)
        return self._answered

    def redact(self, frame: Frame) -> None:
        """Take out of a frame what is marked there."""
        for piece, unit, start in zip(frame.pieces, frame.units, frame.starts, strict=True):
            if piece.whole:
                self._replaced_at.pop(unit, None)
            if (marks := self._marks_of(unit)) and (text := self._without(unit, piece.text, start, marks)) is not None:
                piece.replace(text)
                frame.changed = True

    def _without(self, unit: Unit, text: str, start: int, marks: Sequence[Mark]) -> str | None:
        """The text, which begins at ``start`` of its unit, without what is marked; None when nothing of it is."""
        end, at, kept = start + len(text), start, []
        # They are in order, and there may be many of them and of such pieces.
        first = bisect_right(marks, start, key=lambda one: one.end)
        here = marks[first : bisect_left(marks, end, lo=first, key=lambda one: one.start)]
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

    async def _texts(self, stages: tuple[Stage, ...], *, complete: bool) -> dict[Unit, dict[str, Score]]:
        """Scores of detectors that read text: of every text that is new, in threads, each within a bounded time."""
        self._reading.take()
        if complete:
            # Of what is not all of it, nothing is wanted any more.
            self._reading.stop()
        busy = self._reading.under_way
        readers = [one for one in self.judges.readers(stages) if one.key not in busy]
        units = {**self.texts} or {(0, ""): ""}
        self._units_read = list(units)
        if not (readers or busy):
            return {}
        works = {
            one.key: Reader(partial(self._read_by, one, units), self.judges.wait_for(one, stages)) for one in readers
        }
        characters = sum(map(len, units.values()))
        earlier = self._reading
        self._reading = await read_by_each(works, [LATE] * len(units), characters, self.threads)
        self._reading.carry_on(earlier)
        self._reading.take()
        return self._scores_of_texts()

    def _scores_of_texts(self) -> dict[Unit, dict[str, Score]]:
        """Of each text that was read last. What nobody waits for is what it was before as long as it does not come."""
        found = {}
        for unit, scores in zip(self._units_read, self._reading.each, strict=True):
            found[unit] = {
                key: self._read.get((unit, key), UNREAD)[1] if score is PENDING else score
                for key, score in scores.items()
            }
        return found

    def _read_by(self, reader: Measurement, units: Mapping[Unit, str]) -> list[Score]:
        """One detector's scores of the texts, those that it has read as they are as they were."""
        found = []
        for unit, text in units.items():
            known = self._read.get((unit, reader.key))
            if known is None or known[0] != text:
                known = self._read[unit, reader.key] = (text, reader.score_text(text))
            found.append(known[1])
        return found

    async def _passes(self) -> dict[Unit, dict[str, Score]]:
        """Scores of detectors that have the model read something about the answer: of each of its texts, within a
        bounded time. At ``NOWHERE``: of whatever is no text."""
        asking = self.judges.asking_again(self.asked)
        if not asking:
            return {}
        began_s = time.perf_counter()
        said = {unit: text for unit, text in self.texts.items() if text.strip() and self._in_words(unit)}
        # Some APIs send a text twice.
        tasks = {
            (one.key, text): asyncio.create_task(self._pass(one, text))
            for one in asking
            for text in dict.fromkeys(said.values())
        }
        acting = {one.key: self.judges.wait_for(one, LATER) for one in asking}
        waited = [task for (key, _), task in tasks.items() if acting[key].acts]
        try:
            await _ended(waited, max((one.limit_s for one in acting.values() if one.acts), default=0.0))
        except BaseException:
            await _ended([*tasks.values()], 0.0)
            raise
        self.second_pass_s = time.perf_counter() - began_s
        self._passing = {at: task for at, task in tasks.items() if not acting[at[0]].acts}
        none = dict.fromkeys(acting, NO_WORDS)
        self._passed = {NOWHERE: none} | {
            unit: {key: UNREAD[1] if (key, text) in self._passing else _result(tasks[key, text]) for key in acting}
            for unit, text in said.items()
        }
        return self._passed

    def _in_words(self, unit: Unit) -> bool:
        return self.conversation.words(channel_of(unit))

    async def _pass(self, one: Measurement, text: str) -> Score:
        asked = one.second_pass(text, self.conversation.parts, self.conversation.roles)
        if not isinstance(asked, SecondPass):
            return asked
        if self.conversation.reader is None:
            return Score("unavailable", reason="there is no model to ask")
        try:
            return one.score_pass(await self.conversation.reader.read(asked.messages, spec_of(asked)))
        except SecondPassError as error:
            return Score("unavailable", reason=str(error))

    def _take(self, readouts: Sequence[Readouts]) -> None:
        """Put what has grown since the last time to what there was."""
        for one in readouts[self._taken :]:
            if one.stage == "progress":
                before = self._grown.get(one.choice_index)
                items = dict(before.items) if before else {}
                for name, item in one.items.items():
                    items[name] = join([items[name], item]) if name in items else item  # type: ignore[type-var]
                self._grown[one.choice_index] = replace(one, items=items)
        self._taken = len(readouts)

    def _behind(self, unit: Unit, found: Readouts | None) -> dict[str, Score]:
        """Scores, while the answer grows, of detectors of what its tokens have in them: for those that nothing has come
        for yet, and for those that too little has come for."""
        scores: dict[str, Score] = {}
        for one in self.judges.growing():
            if found is not None and any(
                item.status != "complete" for name, item in found.items.items() if name.startswith(f"{one.key}.")
            ):
                continue
            last = one.last_position(found) if found is not None else None
            read = 0 if last is None or found is None else last + 1 - found.prompt_tokens
            if self.tokens[unit[0]] - read > self.judges.live.window_tokens:
                scores[one.key] = Score("unavailable", reason="the engine's readouts are far behind the answer")
            elif last is None:
                scores[one.key] = Score("not_applicable", reason=NOT_YET)
        return scores

    def _judged(
        self, unit: Unit, texts: Mapping[str, Score], readouts: Sequence[Readouts], stages: Sequence[Stage]
    ) -> Ruling:
        prompts = [self.prompt] if self.prompt else [one for one in readouts if one.stage == "prompt"]
        parts = [most_complete(prompts)] if prompts else []
        if (grown := self._grown.get(unit[0])) is not None:
            parts.append(grown)
        parts += [one for one in readouts if one.stage == "final" and one.choice_index == unit[0]]
        items = {name: item for one in parts for name, item in one.items.items()}
        found = replace(parts[0], items=items) if items else None
        reason = self.reason or "the engine sent no readouts of the answer"
        if stages == STREAM:
            texts = {**texts, **self._behind(unit, found)}
        scores = self.judges.scores(self.asked, found, reason, texts=texts, stages=stages)
        both = [self.judges.decide(scores, stage) for stage in stages]
        live = [one for one, _ in both]
        shadows = [one for _, one in both if one is not None]
        decision = joined(max(live, key=severity_of), live)
        self._rulings[unit] = decision, scores.live
        self._marked.pop(unit, None)
        shadow = joined(max(shadows, key=severity_of), shadows) if shadows else None
        return Ruling(unit[0], scores.live, decision, shadow, scores.shadow)

    def _marks_of(self, unit: Unit) -> list[Mark]:
        """What is marked in a text as it was judged last. Found when it is first asked for: while an answer is held,
        it is judged far more often than it is let go."""
        if unit not in self._rulings:
            return []
        if unit not in self._marked:
            self._marked[unit] = self._marks(*self._rulings[unit])
        return self._marked[unit]

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


async def _ended(tasks: Collection[asyncio.Task[Score]], limit_s: float) -> None:
    """Those that do not end within so many seconds are cancelled."""
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, timeout=limit_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _result(task: asyncio.Task[Score]) -> Score:
    return PASS_LATE if not task.done() or task.cancelled() else task.result()


def unit_of(piece: Piece) -> Unit:
    return piece.choice, piece.channel + (WHOLE if piece.whole else "")


def channel_of(unit: Unit) -> str:
    """The channel that a unit is of, or a second copy of."""
    return unit[1].rpartition(WHOLE)[0] if WHOLE in unit[1] else unit[1]


def _merged(marks: Iterable[Mark]) -> list[Mark]:
    """In order, with those that overlap as one."""
    merged: list[Mark] = []
    for mark in sorted(marks, key=lambda one: (one.start, one.end)):
        if merged and mark.start < merged[-1].end:
            merged[-1] = replace(merged[-1], end=max(mark.end, merged[-1].end))
        else:
            merged.append(mark)
    return merged


def severity_of(decision: Decision) -> int:
    """Of the enforced rule that hit worst; 0 where none did."""
    return max((hit.severity for hit in decision.hits if hit.mode == "enforce"), default=0)


def joined(decisive: Decision, decisions: Sequence[Decision]) -> Decision:
    """``decisive``, which is one of them, with the hits of all, each rule once: as it first hit worst, which is the hit
    that ``_Kept`` has the scores of."""
    hits: dict[str, RuleHit] = {}
    for hit in (hit for one in decisions for hit in one.hits):
        if hit.rule not in hits or hits[hit.rule].severity < hit.severity:
            hits[hit.rule] = hit
    order = dict.fromkeys(hit.rule for one in (decisive, *decisions) for hit in one.hits)
    flags = tuple(dict.fromkeys(name for one in (decisive, *decisions) for name in one.flags))
    would = max(decisions, key=lambda one: SEVERITY[one.would]).would
    return replace(decisive, hits=tuple(hits[rule] for rule in order), flags=flags, would=would)
