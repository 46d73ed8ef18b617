"""The guard's detectors without the guard: scores of conversations, from an engine in this process or from a server.

Owns the way from a detector's plan to a spec and back. The proxy has its own (``guard.policy.measuring``), where
several detectors of a policy share one request; the detectors, and so the scores, are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from detectors.base import Detector, Score, SecondPass, SecondPassDetector, SpanDetector, WindowDetector
from detectors.windows import MORE, passes_of, windowed
from guard.blank_text import is_blank, mistake_in
from guard.mia.engine_config import EngineConfig
from guard.mia.spec import MiaSpec, Span, SpanPositions
from guard.uses.asking import Ask, Messages, Told


@dataclass(frozen=True)
class Scored:
    """``answer``: what the model said, up to as many tokens as were asked for."""

    score: Score
    answer: str


def spec_of(detector: Detector) -> MiaSpec:
    """What a detector reads of one conversation. Its spans are those it has where no policy says otherwise."""
    plan = detector.plan()
    spans: dict[str, Span] = dict(plan.spans)
    probes = {name: probe.capture for name, probe in plan.probes.items()}
    return MiaSpec(spans=spans, hidden=dict(plan.hidden), attention=dict(plan.attention), probes=probes)


def taps_for(detectors: Sequence[Detector | SecondPassDetector]) -> EngineConfig:
    """Taps of an engine that these detectors can read; for probes in the engine see ``detectors.engine_probes``."""
    plans = [one.plan_of_pass if isinstance(one, SecondPassDetector) else one.plan() for one in detectors]
    hidden = [capture for plan in plans for capture in plan.hidden.values()]
    heads = {head for plan in plans for capture in plan.attention.values() for head in capture.heads}
    spans = any(isinstance(capture.positions, SpanPositions) for capture in hidden)
    return EngineConfig(
        hidden_layers=tuple(sorted({capture.layer for capture in hidden})),
        attention_heads=tuple(sorted(heads)),
        max_hidden_rows_per_step="tokens" if spans else None,
    )


def score(ask: Ask, detector: Detector, conversations: Sequence[Messages], max_tokens: int = 1) -> list[Scored]:
    """In order. A detector of answers needs ``max_tokens`` of at least 2. One with windows has the windows of long
    conversations read too, all of them together in a second call of ``ask``."""
    spec = spec_of(detector)
    told = ask([(messages, spec) for messages in conversations], max_tokens)
    scored = [Scored(_score(detector, one), one.text) for one in told]
    if not isinstance(detector, WindowDetector) or detector.windows is None:
        return scored
    passes = [passes_of(messages, detector.windows) for messages in conversations]
    asked = [(list(messages), spec) for of_one, _ in passes for messages in of_one]
    read = iter(ask(asked, 1) if asked else [])
    return [
        replace(one, score=windowed(one.score, [_score(detector, next(read)) for _ in of_one], MORE if more else None))
        for one, (of_one, more) in zip(scored, passes, strict=True)
    ]


def score_claims(ask: Ask, detector: SecondPassDetector, claims: Sequence[tuple[str, dict[str, str]]]) -> list[Score]:
    """Of a detector that has the model read something of its own. claims: an answer, and the texts that it goes by.
    Raises ``ValueError`` for texts that are no characters; a blank one is ``unavailable``."""
    for i, (answer, texts) in enumerate(claims):
        for name, text in (("text", answer), *((f"{name!r}", text) for name, text in texts.items())):
            if not is_blank(text) and (mistake := mistake_in(text)) is not None:
                raise ValueError(f"the {name} of claim {i} {mistake}")
    passes = [detector.second_pass(answer, texts) for answer, texts in claims]
    asked = [one for one in passes if isinstance(one, SecondPass)]
    told = iter(
        ask([([dict(m) for m in one.messages], MiaSpec(hidden=dict(one.plan.hidden))) for one in asked])
        if asked
        else []
    )
    return [one if isinstance(one, Score) else detector.score_pass(next(told).items) for one in passes]


def _score(detector: Detector, told: Told) -> Score:
    if isinstance(detector, SpanDetector):
        return detector.score_spans(told.items, told.prompt.span_tokens)
    return detector.score(told.items)
