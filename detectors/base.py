"""The one small interface between readouts, or text, and scores.

A detector says what the aperture must read for it and turns what came back into one calibrated score; or it reads text
and nothing else. It never sees HTTP, a policy or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from guard.mia.results import Readout
from guard.mia.spec import AttentionCapture, HiddenCapture

ScoreStatus = Literal["scored", "unavailable", "not_applicable"]


@dataclass(frozen=True)
class Score:
    """``value`` is higher the likelier what the detector looks for; None unless ``status`` is ``scored``.

    ``not_applicable`` is the policy's word for a request that has nothing the detector is for; detectors never say it.
    ``timed_out``: unavailable because it did not come in time. ``spans``: of a text, the characters [start, end) that
    make the score what it is, for redaction; empty when no part stands out.
    """

    status: ScoreStatus
    value: float | None = None
    reason: str = ""
    timed_out: bool = False
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class CapturePlan:
    """What one detector needs from the aperture, under names that are its own.

    ``spans`` are roles that the policy binds to messages: a detector asks for "instruction" and "data", and the
    policy says which messages these are.
    """

    hidden: Mapping[str, HiddenCapture] = field(default_factory=dict)
    attention: Mapping[str, AttentionCapture] = field(default_factory=dict)
    spans: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Span name -> default message selectors, used unless the policy binds the span otherwise."""


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
class TextDetector(Protocol):
    """The other kind: it reads text, of a prompt or of an answer. Built and registered alike; called from several
    threads, and again as an answer grows: keep it stateless, and quick."""

    kind: str
    """As a ``Detector``'s."""

    thresholds: Mapping[str, float]
    """As a ``Detector``'s."""

    def score_text(self, text: str) -> Score:
        """Score of one text: messages of the prompt, or so much of an answer as there is, its words, its reasoning and
        each tool call's arguments apart. A text that can be read in other ways than it is spelt, with letters of other
        scripts or nothing between them, is scored once for each way, and the worst counts: write patterns in plain
        letters. Raises for nothing that a text may hold."""
        ...


AnyDetector = Detector | TextDetector
