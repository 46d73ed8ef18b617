"""The one small interface between readouts, text or other scores, and a score.

A detector says what the aperture must read for it and turns what came back into one calibrated score. Three kinds read
something else: text, what the model makes of a question of the detector's own, or other detectors' scores. None sees
HTTP, a policy or an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from guard.mia.results import FloatArray, Readout
from guard.mia.spec import AttentionCapture, HiddenCapture, Positions, ProbeCapture, TokenRanges

if TYPE_CHECKING:
    from detectors.windows import Windows

ScoreStatus = Literal["scored", "unavailable", "not_applicable"]


@dataclass(frozen=True)
class Passage:
    """Tokens [start, end) of the prompt. ``weight``: their share of what the detector looks at, 0 to 1."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Score:
    """``value`` is higher the likelier what the detector looks for; None unless ``status`` is ``scored``.

    ``not_applicable`` is the policy's word for a request that has nothing the detector is for; detectors never say it.
    ``timed_out``: unavailable because it did not come in time. ``spans``: of a text, the characters [start, end) that
    make the score what it is, for redaction; empty when no part stands out. ``passages``: of the prompt, the tokens
    that make it so, the largest share first. ``details``: further numbers by name, such as each label's probability
    where a detector tells more than yes and no apart. Set by whoever calls the detector: ``floor``, at least this high,
    for ``reason``: a bound that it does not reach may be reached; ``dropped``, unavailable because the engine had no
    space for what is read; ``took_s``, seconds that the detector itself computed.
    """

    status: ScoreStatus
    value: float | None = None
    reason: str = ""
    timed_out: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    passages: tuple[Passage, ...] = ()
    details: tuple[tuple[str, float], ...] = ()
    floor: bool = False
    dropped: bool = field(default=False, compare=False)
    took_s: float | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class EngineProbe:
    """A linear readout that the engine computes itself: its logits leave it, the states do not.

    weight: ``[outputs, hidden_size]`` float32, bias: ``[outputs]`` float32. The engine must have been started with it,
    as ``detectors.engine_probes`` writes it.
    """

    layer: int
    weight: FloatArray
    bias: FloatArray
    positions: Positions = "last_prompt"

    @cached_property
    def name(self) -> str:
        """Says what it computes, so that an engine never answers with other weights under the same name."""
        content = b"|".join([str(self.layer).encode(), self.weight.tobytes(), self.bias.tobytes()])
        return f"guard-{hashlib.sha256(content).hexdigest()[:24]}"

    @property
    def capture(self) -> ProbeCapture:
        return ProbeCapture(probe=self.name, positions=self.positions)


@dataclass(frozen=True)
class CapturePlan:
    """What one detector needs from the aperture, under names that are its own.

    ``spans`` are roles that the policy binds to messages: a detector asks for "instruction" and "data", and the
    policy says which messages these are.
    """

    hidden: Mapping[str, HiddenCapture] = field(default_factory=dict)
    attention: Mapping[str, AttentionCapture] = field(default_factory=dict)
    probes: Mapping[str, EngineProbe] = field(default_factory=dict)
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Span name -> default message selectors, used unless the policy binds the span otherwise."""


@runtime_checkable
class Detector(Protocol):
    """Built once from its ``model_configs`` file, then called for every request from many tasks: keep it stateless."""

    kind: str
    """Name under which it is registered, as policies write it: ``attention_tracker``, ``probe``."""

    thresholds: Mapping[str, float]
    """Named operating points measured at calibration (for example ``fpr_1pct``), usable in policies by name."""

    def plan(self) -> CapturePlan: ...

    def score(self, readouts: Mapping[str, Readout]) -> Score:
        """Score from readouts keyed as in ``plan()``. A readout that is missing or not complete gives ``unavailable``
        with the reason; never raises for what an engine may send."""
        ...


@runtime_checkable
class WeightsDetector(Detector, Protocol):
    """A detector that multiplies states by weights, which an engine that was started with these can do for it."""

    def computed(self, *, in_engine: bool) -> Detector:
        """The same detector; with ``in_engine`` its plan has probes in place of hidden states."""
        ...


SpanTokens = Mapping[str, tuple[tuple[int, int], ...]]
"""A detector's spans -> token ranges [start, end) of the prompt."""


@runtime_checkable
class SpanDetector(Detector, Protocol):
    """A detector that must also know which tokens its spans are; called instead of ``score`` where that is known."""

    def score_spans(self, readouts: Mapping[str, Readout], span_tokens: SpanTokens) -> Score:
        """As ``score``."""
        ...


@runtime_checkable
class WindowDetector(Detector, Protocol):
    """A detector that may have the model read a long prompt's data once more, window by window, each in a pass of its
    own: its ``plan``, of which every capture is of the prompt, is read of each, and the highest score counts."""

    windows: Windows | None
    """None: it reads prompts as they are, and nothing more."""


@dataclass(frozen=True)
class TokenValues:
    """``values``: one for each of ``positions``, 0 to 1."""

    values: tuple[float, ...]
    positions: tuple[int, ...]


@runtime_checkable
class TokenReader(Protocol):
    """A detector that also shows what it goes by token for token, to people who look at one request."""

    looks_back: bool
    """False: a value for each token that is read. True: for each token up to those that are read, how much they attend
    to it."""

    def token_plan(self, tokens: TokenRanges) -> CapturePlan:
        """What to capture, reading at ``tokens``. It has no spans."""
        ...

    def token_values(self, readouts: Mapping[str, Readout]) -> TokenValues | Score:
        """From readouts keyed as in the plan; a ``Score`` that says why where there are none."""
        ...


@dataclass(frozen=True)
class SecondPass:
    """A conversation of the detector's own that the model reads once more, and what is captured of it.

    messages: with ``role`` and ``content``. One token is generated and thrown away. ``plan`` has no spans.
    """

    messages: tuple[Mapping[str, str], ...]
    plan: CapturePlan


@runtime_checkable
class SecondPassDetector(Protocol):
    """It judges an answer by what the model makes of a question about it, which costs the reading of one more prompt.

    Built and registered as a ``Detector``; scored once for each answer that is complete.
    """

    kind: str
    """As a ``Detector``'s."""

    thresholds: Mapping[str, float]
    """As a ``Detector``'s."""

    spans: Mapping[str, tuple[str, ...]]
    """Names of the texts of the conversation that it needs -> default message selectors, as in ``CapturePlan``."""

    plan_of_pass: CapturePlan
    """What any of its passes captures, for those who start engines."""

    def second_pass(self, answer: str, texts: Mapping[str, str]) -> SecondPass | Score:
        """What to ask of the model; a ``Score`` where there is nothing to ask. texts: by the names in ``spans``."""
        ...

    def score_pass(self, readouts: Mapping[str, Readout]) -> Score:
        """Score from the pass's readouts, as ``Detector.score``."""
        ...


@runtime_checkable
class ScoreDetector(Protocol):
    """It combines scores of other detectors of the same policy."""

    kind: str
    """As a ``Detector``'s."""

    thresholds: Mapping[str, float]
    """As a ``Detector``'s."""

    inputs: tuple[str, ...]
    """Kinds of the detectors whose scores it takes; the policy says which of its detectors these are."""

    def score_from(self, scores: Mapping[str, Score]) -> Score:
        """Score from the inputs' scores, of whatever status, by the names in ``inputs``; never raises."""
        ...


@runtime_checkable
class TextDetector(Protocol):
    """It reads text, of a prompt or of an answer. Built and registered alike; called from several
    threads, and again as an answer grows: keep it stateless, and quick."""

    kind: str
    """As a ``Detector``'s."""

    thresholds: Mapping[str, float]
    """As a ``Detector``'s."""

    def score_text(self, text: str) -> Score:
        """Score of one text: messages of the prompt, or so much of an answer as there is, its words, its reasoning and
        each tool call's arguments apart. A text that can be read in other ways than it is spelt, with letters of other
        scripts or nothing between them, is scored once for each way, and the worst counts: write patterns in plain
        letters. Raises for nothing that a text may hold. A class with ``isolated = True`` is read in a process of its
        own (``detectors.isolated``)."""
        ...


AnyDetector = Detector | TextDetector | SecondPassDetector | ScoreDetector
