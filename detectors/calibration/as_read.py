"""Detectors that read what is not kept of rows: their captures go with the rows' own, and they score what comes.

Owns which detectors these are, and their scores on disk, one for each conversation, so that a run which was stopped
goes on where it was. What is read itself is not kept: the states or weights of every token are large.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from detectors.attention_tracker import AttentionTracker
from detectors.base import Score
from detectors.calibration.captures import Captures
from detectors.calibration.feature_store import FeatureError, Kept, Plan
from detectors.calibration.metrics import Scores
from detectors.calibration.rows import Row
from detectors.probe import Probe
from guard.mia.results import Readouts
from guard.mia.spec import AttentionCapture, FirstGenerated, HiddenCapture

SCORE = "score"


def captures_of(detector: Probe | AttentionTracker) -> Captures:
    """Under the detector's own names. A probe that the engine computes is computed here, which is the same sum."""
    plan = detector.plan()
    probes = {name: HiddenCapture(layer=one.layer, positions=one.positions) for name, one in plan.probes.items()}
    generated = [
        one.positions.generated for one in plan.attention.values() if isinstance(one.positions, FirstGenerated)
    ]
    return Captures({**plan.hidden, **probes}, plan.attention, max(generated, default=0))


def reads_beyond(detector: object, plan: Plan) -> bool:
    """Whether what the detector reads is not what is kept of every row."""
    if not isinstance(detector, Probe | AttentionTracker):
        return False
    captures = captures_of(detector)

    def kept(capture: HiddenCapture) -> bool:
        if capture.positions == "last_prompt":
            return capture.layer in plan.layers
        of_means = isinstance(detector, Probe) and detector.config.params.pooling == "mean"
        return of_means and capture.layer in plan.window_layers

    def kept_mass(capture: AttentionCapture) -> bool:
        return capture.positions == "last_prompt" and not capture.weights and set(capture.heads) <= set(plan.heads)

    return not (all(map(kept, captures.hidden.values())) and all(map(kept_mass, captures.attention.values())))


def lacking_taps(captures: Captures, plan: Plan) -> str:
    """Why an engine with the taps that ``plan`` was made of cannot read this; empty when it can."""
    if layers := sorted({one.layer for one in captures.hidden.values()} - set(plan.layers)):
        return f"the engine has no taps for hidden states of layers {layers}"
    if not plan.window_layers and any(one.positions != "last_prompt" for one in captures.hidden.values()):
        return "the engine's max_hidden_rows_per_step is too small for the states of every token"
    if heads := sorted({head for one in captures.attention.values() for head in one.heads} - set(plan.heads)):
        return (
            f"the engine has no taps for the attention of heads {[list(head) for head in heads]}, layers counted from 1"
        )
    return ""


class AsRead:
    """One such detector. ``why``: why there are no scores of it; empty as long as there are.

    model_key: as for ``FeatureStore``; wanted: of which rows it shall score.
    """

    def __init__(
        self,
        kind: str,
        detector: Probe | AttentionTracker,
        model_key: str,
        wanted: Callable[[Row], bool],
        why: str = "",
        folder: Path | None = None,
    ) -> None:
        own = captures_of(detector)
        self.why = why
        self.captures = Captures(
            {f"{kind}.{name}": one for name, one in own.hidden.items()},
            {f"{kind}.{name}": one for name, one in own.attention.items()},
            own.answer_tokens,
        )
        self._prefix = f"{kind}."
        self._detector = detector
        self._wanted = wanted
        self._kept = Kept(json.dumps([1, SCORE, model_key, kind, self._detector.config.fingerprint]), [SCORE], folder)

    def lacks(self, row: Row) -> bool:
        return not self.why and self._wanted(row) and not self._kept.has(row.messages)

    def take(self, row: Row, readouts: Readouts) -> None:
        score = self._score(readouts)
        if score.value is None:
            self.why = self.why or f"{row.named}: {score.reason}"
        else:
            self._kept.put_arrays(row.messages, {SCORE: np.array([score.value], np.float64)})

    def scores(self, rows: Sequence[Row]) -> Scores:
        """``[rows]``. Raises ``FeatureError`` when there is none of a row."""
        kept = [self._kept.arrays(row.messages) for row in rows]
        if self.why or any(one is None for one in kept):
            raise FeatureError(self.why or "a score that was kept cannot be found again; run the command once more")
        return np.array([one[SCORE][0] for one in kept if one is not None], np.float64)

    def _score(self, readouts: Readouts) -> Score:
        items = readouts.items.items()
        own = {name.removeprefix(self._prefix): one for name, one in items if name.startswith(self._prefix)}
        if isinstance(self._detector, AttentionTracker):
            return self._detector.score_spans(own, readouts.span_tokens)
        return self._detector.score(own)
