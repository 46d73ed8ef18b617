"""One detector's way to the engine and back: which captures it needs, and its score from what came.

Owns names on that way: a capture ``c`` of the detector that travels as ``key`` is ``key.c``. Never sees a tensor or
HTTP.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, groupby
from math import isfinite
from time import perf_counter
from typing import TypeVar, cast

from detectors.base import (
    AnyDetector,
    CapturePlan,
    Detector,
    Score,
    ScoreDetector,
    SecondPass,
    SecondPassDetector,
    SpanDetector,
    TextDetector,
    WindowDetector,
)
from detectors.deadline import TooLateError, check_deadline
from detectors.windows import CUT, DATA, IN_PASS, INSTRUCTION, TEXTS, UNREAD, Window, Windows, cut, windowed
from guard.mia.results import AttentionReadout, AttentionRowsReadout, Readout, Readouts
from guard.mia.spec import (
    AttentionCapture,
    Capture,
    HiddenCapture,
    MiaSpec,
    ProbeCapture,
    Span,
    SpanPositions,
    Steer,
    generates,
)
from guard.policy.conversation import (
    WORDS,
    ConversationError,
    any_stranger,
    ends_behind_others,
    matches,
    means_documents,
    places,
    resolved,
    roles_named,
)
from guard.policy.readings import Reading, other_readings
from guard.policy.schema import DetectorUse

log = logging.getLogger("guard.policy")

OUT_OF_SCOPE = "the request has no message in its scope"
UNKNOWN_ROLE = "no message is known to be in its scope, and a message's role is unknown"
SHADOW_PREFIX = "."
"""Before the key of a detector that only the shadow policy has: no detector's own name begins so."""

GATE_PREFIX = ".."
"""Before the name of a probe that a rule's gate reads and no detector: no detector's key begins so."""

BEHIND_OTHERS = (
    "the last message is the assistant's or the system's: the prompt does not end where others have just spoken"
)
"""Detectors are calibrated where others have. What a client has assistant or system say after that makes them see
less."""

SPANS_AT_ONCE = 4096
"""Spans that are looked up before it is asked whether that is still wanted."""

NO_TEXT = "there is no text to read"
NOT_YET = "the engine has sent nothing of the answer yet"

Part = tuple[int, int, str]
"""One text of a conversation: index of its message, number of the part in it, and the text. The number is negative for
what is not a part of its content, and the index for what is in no message (``conversation.DOCUMENTS``)."""


@dataclass(frozen=True)
class Unplaced:
    """Why it is not known where something of a prompt stands; empty where it is. ``whole``: where it ends and which of
    it is whose. ``documents``: where those are that the request has beside its messages; empty without any. ``turns``:
    where one who speaks ends, so that what is read at the prompt's end may be less than there is."""

    whole: str = ""
    documents: str = ""
    turns: str = ""


PLACED = Unplaced()


@dataclass(frozen=True)
class Passes:
    """What a detector with windows has the model read of a prompt: ``instruction`` with each of ``windows`` in turn, of
    which this has the text, message and part, and where it is in that. ``more``: there are windows beyond these."""

    instruction: str
    windows: tuple[tuple[str, tuple[int, int], Window], ...]
    more: bool


@dataclass(frozen=True)
class Measurement:
    """A detector with its captures under the names in which they travel. ``spans`` may still have words. ``named``:
    roles that its scope and spans name."""

    key: str
    detector: AnyDetector
    scope: tuple[str, ...]
    spans: Mapping[str, tuple[str, ...]]
    named: frozenset[str] = frozenset()
    hidden: Mapping[str, HiddenCapture] = field(default_factory=dict)
    attention: Mapping[str, AttentionCapture] = field(default_factory=dict)
    probes: Mapping[str, ProbeCapture] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Of a detector that combines scores: its input -> the policy's detector."""
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a detector with windows: which messages its instruction and its data are."""

    # What it is, once: to look through a protocol's methods takes as long as the detectors' own arithmetic.

    @cached_property
    def reads_text(self) -> bool:
        return isinstance(self.detector, TextDetector)

    @cached_property
    def asks_again(self) -> bool:
        """Whether it has the model read something of its own, about the answer."""
        return isinstance(self.detector, SecondPassDetector)

    @cached_property
    def combines(self) -> bool:
        """Whether it is computed from other detectors' scores."""
        return isinstance(self.detector, ScoreDetector)

    @cached_property
    def reads_engine(self) -> bool:
        """Whether the engine's readouts of the request itself are what it needs."""
        return isinstance(self.detector, Detector)

    @cached_property
    def reads_spans(self) -> bool:
        """Whether it also needs to know where its spans are."""
        return isinstance(self.detector, SpanDetector)

    @cached_property
    def windows(self) -> Windows | None:
        """Into which it cuts a long prompt's data; None where it reads the prompt alone."""
        return self.detector.windows if isinstance(self.detector, WindowDetector) else None

    @cached_property
    def in_pass(self) -> Measurement:
        """The same as it reads a window's pass, which is a conversation without anything else."""
        spans = {name: IN_PASS[name.removeprefix(f"{self.key}.")] for name in self.spans}
        return replace(self, scope=(), spans=spans, named=frozenset())

    def passes(self, parts: Sequence[Part], roles: Sequence[str]) -> Passes:
        """Of a detector with windows: what it has the model read once more."""
        assert self.windows is not None
        data = meant_by(self.texts[DATA], parts, roles)
        found = cut([text for _, _, text in data], self.windows)
        instruction = text_of(self.texts[INSTRUCTION], parts, roles)
        windows = tuple((data[one.text][2][one.start : one.end], data[one.text][:2], one) for one in found.windows)
        return Passes(instruction, windows, found.more)

    @cached_property
    def _plain_captures(self) -> tuple[tuple[str, str], ...]:
        """Of captures that name no span: as they travel, and as the detector named them."""
        return self._named((*self.hidden, *self.probes))

    @cached_property
    def _attention_captures(self) -> tuple[tuple[str, str], ...]:
        return self._named(self.attention)

    def _named(self, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
        return tuple((key, key.removeprefix(f"{self.key}.")) for key in keys)

    @property
    def captures(self) -> tuple[Capture, ...]:
        return (*self.hidden.values(), *self.attention.values(), *self.probes.values())

    @property
    def reads_answer(self) -> bool:
        """Whether it needs what the model computes while it answers."""
        return any(map(generates, self.captures))

    @cached_property
    def reads_prompt(self) -> bool:
        """Whether what it needs of the engine depends on where the prompt ends, or which of it is whose."""
        return self.reads_engine and (bool(self.spans) or not all(map(generates, self.captures)))

    def lost(self, unplaced: Unplaced) -> str:
        """Why it cannot read such a prompt; empty where it can."""
        if not self.reads_prompt:
            return ""
        documents = unplaced.documents if any(map(means_documents, self.spans.values())) else ""
        return unplaced.whole or documents

    def applies(self, roles: Sequence[str], unplaced: Unplaced) -> bool:
        """Whether anything is in its scope."""
        here = not self.scope or matches(self.scope, roles, self.named)
        return here or (bool(unplaced.documents) and means_documents(self.scope))

    @cached_property
    def reads_end(self) -> bool:
        """Whether it reads the prompt's last token."""
        return any(one.positions == "last_prompt" for one in self.captures)

    @property
    def depends_on_conversation(self) -> bool:
        return bool(self.scope) or any(one in WORDS for selectors in self.spans.values() for one in selectors)

    def spans_in(self, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Plain selectors. Raises ``ConversationError``."""
        return {name: resolved(selectors, roles, self.named) for name, selectors in self.spans.items()}

    def out_of_scope(self, roles: Sequence[str]) -> Score:
        """Of a request in which no message is meant by the scope. Where a message has a role that nobody knows, it may
        be one to the model: what should be read in the model is then missing, and does not apply only otherwise."""
        if self.reads_engine and roles_named(self.scope) and any_stranger(roles, self.named):
            return Score("unavailable", reason=UNKNOWN_ROLE)
        return Score("not_applicable", reason=OUT_OF_SCOPE)

    def score(self, readouts: Readouts) -> Score:
        items, prefix = readouts.items, f"{self.key}."
        own = {short: items[key] for key, short in self._plain_captures if key in items}
        for key, short in self._attention_captures:
            if key in items:
                own[short] = _as_detector_named_it(items[key], prefix)
        if self.reads_spans:
            spans = {
                name.removeprefix(prefix): tokens
                for name, tokens in readouts.span_tokens.items()
                if name.startswith(prefix)
            }
            score = self._checked(partial(cast(SpanDetector, self.detector).score_spans, own, spans))
        elif self.reads_engine:
            score = self._checked(partial(cast(Detector, self.detector).score, own))
        else:
            return Score("unavailable", reason=NO_TEXT)
        dropped = score.status == "unavailable" and any(item.status == "dropped" for item in own.values())
        return replace(score, dropped=True) if dropped else score

    def last_position(self, readouts: Readouts) -> int | None:
        """The last generated token of which every capture that grows has come; None while one has nothing."""
        grown = [name for name in (*self.hidden, *self.attention, *self.probes) if generates(self._capture(name))]
        ends = [getattr(readouts.items.get(name), "positions", ()) for name in grown]
        return min((max(positions, default=-1) for positions in ends), default=-1) if all(ends) else None

    def _capture(self, name: str) -> Capture:
        found = self.hidden.get(name) or self.attention.get(name) or self.probes.get(name)
        assert found is not None, "it is the name of one"
        return found

    def score_from(self, scores: Mapping[str, Score]) -> Score:
        """Of a detector that combines. scores: by the policy's names."""
        detector = self.detector
        assert isinstance(detector, ScoreDetector)
        missing = Score("unavailable", reason="it was not measured")
        own = {name: scores.get(of, missing) for name, of in self.inputs.items()}
        score = self._checked(lambda: detector.score_from(own))
        least = next((one for one in own.values() if one.floor), None)
        return score if least is None else at_least(score, least.reason)

    def second_pass(self, answer: str, parts: Sequence[Part], roles: Sequence[str]) -> SecondPass | Score:
        """Of a detector that asks again: what to ask, or a score where there is nothing to ask."""
        detector = self.detector
        assert isinstance(detector, SecondPassDetector)
        prefix = f"{self.key}."
        texts = {name.removeprefix(prefix): text_of(selectors, parts, roles) for name, selectors in self.spans.items()}
        try:
            return detector.second_pass(answer, texts)
        except Exception as error:
            return self._failed(error)

    def score_pass(self, readouts: Readouts) -> Score:
        """Of a detector that asks again: from what came of its pass, whose captures have their own names."""
        detector = self.detector
        assert isinstance(detector, SecondPassDetector)
        return self._checked(lambda: detector.score_pass(readouts.items))

    def score_text(self, text: str) -> Score:
        """Of a detector that reads text: the worst of the ways in which it can be read. Raises ``TooLateError``."""
        return self._worst([text])

    def score_prompt(self, parts: Sequence[Part], roles: Sequence[str]) -> Score:
        """The same of the texts of a conversation that it is for, one under the other. Templates may also show the
        parts of one message without anything between them."""
        meant = places(self.scope, roles, self.named) if self.scope else None
        here = [one for one in parts if meant is None or (one[0], None) in meant]
        glued = groupby(enumerate(here), key=lambda one: (one[1][0], 0 if one[1][1] >= 0 else one[0] + 1))
        shown = ("".join(text for _, (_, _, text) in texts) for _, texts in glued)
        return self._worst(dict.fromkeys(("\n".join(text for _, _, text in here), "\n".join(shown))))

    def _worst(self, texts: Iterable[str]) -> Score:
        assert self.reads_text
        detector = cast(TextDetector, self.detector)
        scores = []
        for text in texts:
            scores.append(self._checked(partial(detector.score_text, text)))
            for reading in other_readings(text):
                score = self._checked(partial(detector.score_text, reading.text))
                spans = set(in_original(reading, score.spans))
                scores.append(replace(score, spans=tuple(sorted(span for span in spans if span[0] < span[1]))))
        took_s = sum(one.took_s or 0.0 for one in scores)
        if missing := next((one for one in scores if one.status != "scored"), None):
            return replace(missing, took_s=took_s)
        worst = max(scores, key=lambda one: one.value if one.value is not None else 0.0)
        standing_out = tuple(dict.fromkeys(span for one in scores for span in one.spans))
        return replace(worst, spans=standing_out, took_s=took_s)

    def _checked(self, scored: Callable[[], Score]) -> Score:
        began_s = perf_counter()
        check_deadline()
        try:
            score = scored()
        except TooLateError:
            raise
        except Exception as error:
            score = self._failed(error)
        return replace(self._usable(score), took_s=perf_counter() - began_s)

    def _usable(self, score: Score) -> Score:
        if score.status == "not_applicable":
            return Score("unavailable", reason="the detector says not_applicable, which only a policy's scope may")
        if score.status == "scored" and (score.value is None or not isfinite(score.value)):
            return Score("unavailable", reason="the score is not a number")
        return score

    def _failed(self, error: Exception) -> Score:
        """A detector may be anybody's, and no score is never clean."""
        name = self.key.removeprefix(SHADOW_PREFIX)
        whose = "the shadow policy's detector" if name != self.key else "detector"
        log.warning("%s %s failed: %s", whose, name, type(error).__name__)
        return Score("unavailable", reason=f"the detector failed ({type(error).__name__})")


def in_original(reading: Reading, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Where in the text as it came the spans of a reading are. Raises ``TooLateError``."""
    for i, span in enumerate(spans):
        if not i % SPANS_AT_ONCE:
            check_deadline()
        yield reading.in_original(span)


def at_least(score: Score, reason: str) -> Score:
    """The score as one that may be higher."""
    return replace(score, floor=True, reason=reason) if score.status == "scored" else score


def text_of(selectors: Sequence[str], parts: Sequence[Part], roles: Sequence[str]) -> str:
    """The texts of all messages that are meant, one under the other."""
    return "\n".join(text for _, _, text in meant_by(selectors, parts, roles))


def meant_by(selectors: Sequence[str], parts: Sequence[Part], roles: Sequence[str]) -> list[Part]:
    """Those of the texts that are meant."""
    meant = places(selectors, roles)
    count = Counter(message for message, part, _ in parts if part >= 0)

    def is_meant(message: int, part: int) -> bool:
        ways = (None, part, part - count[message]) if part >= 0 else (None,)
        return any((message, way) in meant for way in ways)

    return [one for one in parts if is_meant(*one[:2])]


def measurement(
    key: str, detector: AnyDetector, use: DetectorUse, inputs: Mapping[str, str] | None = None
) -> Measurement:
    """``inputs``: as in ``Measurement``. Raises ``ValueError`` for a span that the detector does not have."""
    plan = detector.plan() if isinstance(detector, Detector) else CapturePlan()
    defaults = detector.spans if isinstance(detector, SecondPassDetector) else plan.spans
    windows = isinstance(detector, WindowDetector) and detector.windows is not None
    texts = {**CUT, **{span: own for span, own in defaults.items() if own != TEXTS.get(span)}} if windows else {}
    if unknown := sorted(use.spans.keys() - {**defaults, **texts}.keys()):
        have = ", ".join(sorted({**defaults, **texts})) or "none"
        raise ValueError(f"{detector.kind} has no span {unknown[0]!r}; it has {have}")
    spans = {span: use.spans.get(span, selectors) for span, selectors in defaults.items()}
    texts = {span: use.spans.get(span, selectors) for span, selectors in texts.items()}
    return Measurement(
        key=key,
        detector=detector,
        scope=use.scope,
        spans={f"{key}.{span}": selectors for span, selectors in spans.items()},
        named=roles_named([*use.scope, *chain(*spans.values(), *texts.values())]),
        hidden={f"{key}.{capture}": _at_span(wanted, key) for capture, wanted in plan.hidden.items()},
        attention={
            f"{key}.{capture}": _at_span(
                reading.model_copy(update={"spans": tuple(f"{key}.{span}" for span in reading.spans)}), key
            )
            for capture, reading in plan.attention.items()
        },
        probes={f"{key}.{capture}": _at_span(probe.capture, key) for capture, probe in plan.probes.items()},
        inputs=inputs or {},
        texts=texts,
    )


C = TypeVar("C", HiddenCapture, AttentionCapture, ProbeCapture)


def _at_span(capture: C, key: str) -> C:
    """The capture with the span that it is read at under the name in which that travels."""
    if not isinstance(capture.positions, SpanPositions):
        return capture
    return capture.model_copy(update={"positions": SpanPositions(span=f"{key}.{capture.positions.span}")})


@dataclass(frozen=True)
class Steering:
    """One rule's vectors, its gate among them if it has one. ``reads``: the key of the detector that the gate reads."""

    rule: str
    steer: tuple[Steer, ...]
    probes: Mapping[str, ProbeCapture] = field(default_factory=dict)
    reads: str | None = None


Windowed = tuple[Sequence[Score], Score | None]
"""The scores of a prompt's windows, and why there are more of them; see ``windowed``."""

UNREAD_WINDOWS: Windowed = ((), UNREAD)


@dataclass(frozen=True)
class Question:
    """What one request asks of the engine. ``known``: scores by key that need no reading, or that cannot be read.
    ``floors``: by key of detectors that read where they may see less than there is, why that is so.

    ``armed``: rules whose gated steering goes with it. ``steered``: the rule of each vector of the spec. ``windows``:
    by key of detectors with windows, what came of these; of one that is not there the score is *at least* the prompt's.
    """

    spec: MiaSpec
    known: Mapping[str, Score]
    armed: tuple[str, ...] = ()
    steered: tuple[str, ...] = ()
    floors: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[str, Windowed] = field(default_factory=dict)

    @cached_property
    def gated(self) -> Mapping[str, int]:
        """Of each rule with a gate one of the spec's vectors that it holds back; its others open with it."""
        named = enumerate(zip(self.steered, self.spec.steer, strict=True))
        return {rule: i for i, (rule, steer) in named if steer.gate is not None}

    @cached_property
    def wire(self) -> str | None:
        """The spec as it is sent; None when it asks for nothing. Most requests ask the same."""
        return self.spec.to_wire() if self.spec.asks else None

    @cached_property
    def reads(self) -> bool:
        """Whether readouts of the prompt will come that detectors wait for."""
        probes = [capture for name, capture in self.spec.probes.items() if not name.startswith(GATE_PREFIX)]
        captures: tuple[Capture, ...] = (*self.spec.hidden.values(), *self.spec.attention.values(), *probes)
        return not all(map(generates, captures))

    def scores(
        self,
        measurements: Mapping[str, Measurement],
        readouts: Readouts | None,
        reason: str,
        timed_out: bool,
        texts: Mapping[str, Score] | None = None,
    ) -> dict[str, Score]:
        """One score for each name. None for ``readouts`` makes each that had to be read unavailable, with
        ``reason``. ``texts``: scores by key of the detectors that read text."""
        missing = Score("unavailable", reason=reason, timed_out=timed_out)
        known = {**(texts or {}), **self.known}
        found = {
            name: known.get(one.key) or self._with_windows(one, missing if readouts is None else one.score(readouts))
            for name, one in measurements.items()
            if not one.combines
        }
        why = {name: self.floors.get(measurements[name].key, "") for name in found}
        return {name: at_least(one, why[name]) if why[name] else one for name, one in found.items()}

    def _with_windows(self, measured: Measurement, whole: Score) -> Score:
        if measured.windows is None:
            return whole
        return windowed(whole, *self.windows.get(measured.key, UNREAD_WINDOWS))


def question(
    measurements: Iterable[Measurement],
    roles: Sequence[str] | None,
    steerings: Sequence[Steering] = (),
    unplaced: Unplaced = PLACED,
) -> Question:
    """What to ask for a conversation of messages with these roles; None leaves words in place, for checks alone.

    Detectors that depend on what is ``unplaced`` are unavailable, and gates that would read it are left out with their
    steering.
    """
    measurements = tuple(measurements)
    lost = {one.key: why for one in measurements if (why := one.lost(unplaced))}
    steerings = [one for one in steerings if one.reads not in lost]
    spans: dict[str, Span] = {}
    hidden: dict[str, HiddenCapture] = {}
    attention: dict[str, AttentionCapture] = {}
    probes = {name: capture for one in steerings for name, capture in one.probes.items()}
    known: dict[str, Score] = {}
    for one in measurements:
        if one.key in lost:
            # Whatever its scope: a message may be in there that nobody sees.
            known[one.key] = Score("unavailable", reason=lost[one.key])
            continue
        if roles is not None and not one.applies(roles, unplaced):
            known[one.key] = one.out_of_scope(roles)
            continue
        if one.asks_again:
            # Its spans are texts that go into a conversation of its own.
            continue
        try:
            spans |= one.spans if roles is None else one.spans_in(roles)
        except ConversationError as error:
            known[one.key] = Score("unavailable", reason=str(error))
            continue
        hidden |= one.hidden
        attention |= one.attention
        probes |= one.probes
    spec = MiaSpec(
        spans=spans,
        hidden=hidden,
        attention=attention,
        probes=probes,
        steer=tuple(steer for one in steerings for steer in one.steer),
    )
    rules = tuple(one.rule for one in steerings)
    less = unplaced.turns or (BEHIND_OTHERS if roles is not None and ends_behind_others(roles) else "")
    floors = {one.key: less for one in measurements if less and one.reads_end}
    return Question(spec, known, rules, tuple(one.rule for one in steerings for _ in one.steer), floors)


def with_combined(
    measured: Mapping[str, Measurement], scores: Mapping[str, Score], known: Mapping[str, Score]
) -> dict[str, Score]:
    """The scores of ``measured``, by name, with those that are computed from others. ``known``: by key, those that
    need no computing."""
    return {
        name: (known.get(one.key) or one.score_from(scores)) if one.combines else scores[name]
        for name, one in measured.items()
    }


def _as_detector_named_it(item: Readout, prefix: str) -> Readout:
    if isinstance(item, AttentionReadout | AttentionRowsReadout):
        return replace(item, mass={span.removeprefix(prefix): mass for span, mass in item.mass.items()})
    return item
