"""Scores of whole sets of rows: through the detectors themselves, from what is kept of the rows.

Owns turning kept features back into readouts, so that what is evaluated is the code that serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from detectors.attention_tracker import DATA, INSTRUCTION
from detectors.base import CapturePlan, Detector, Score
from detectors.calibration.features import FeatureError, Features
from detectors.calibration.metrics import Scores
from detectors.calibration.rows import Row
from detectors.combination import Combination
from detectors.text_baseline import TextBaseline
from guard.mia.results import AttentionReadout, HiddenReadout, Readout, RowsReadout
from guard.mia.spec import AttentionCapture, HiddenCapture, SpanPositions


def scored_rows(
    detector: Detector | TextBaseline | Combination,
    rows: Sequence[Row],
    features: Features,
    others: Mapping[str, Scores],
) -> Scores:
    """``[rows]``, whatever the detector reads. others: scores of the same rows by kind, for one that combines them.
    Raises ``FeatureError``."""
    if isinstance(detector, Combination):
        if missing := set(detector.inputs) - set(others):
            raise FeatureError(f"the combination needs scores of {', '.join(sorted(missing))}, which is not calibrated")
        return combined(detector, {name: others[name] for name in detector.inputs})
    if isinstance(detector, TextBaseline):
        return np.array([detector.score_text(row.text).value for row in rows], dtype=np.float64)
    return scores_of(detector, features)


def scores_of(detector: Detector, features: Features) -> Scores:
    """``[rows]``. Raises ``FeatureError`` when the detector reads what is not kept, or has no score for a row."""
    plan = detector.plan()
    scores = []
    for row in range(len(features.hidden)):
        score = detector.score(readouts_of(plan, features, row, getattr(detector, "pooling", None)))
        if score.value is None:
            raise FeatureError(f"{detector.kind} has no score for row number {row}: {score.reason}")
        scores.append(score.value)
    return np.array(scores, dtype=np.float64)


def combined(combination: Combination, scores: Mapping[str, Scores]) -> Scores:
    """``[rows]``, from the scores ``[rows]`` of its inputs by name."""
    rows = zip(*scores.values(), strict=True)
    values = [
        combination.score_from({name: Score("scored", float(one)) for name, one in zip(scores, row, strict=True)}).value
        for row in rows
    ]
    return np.array(values, dtype=np.float64)


def readouts_of(plan: CapturePlan, features: Features, row: int, pooling: object) -> dict[str, Readout]:
    """What an engine would have answered for one row."""
    hidden = {name: _hidden(capture, features, row, pooling) for name, capture in plan.hidden.items()}
    return hidden | {name: _attention(capture, features, row) for name, capture in plan.attention.items()}


def _hidden(capture: HiddenCapture, features: Features, row: int, pooling: object) -> Readout:
    if capture.positions == "last_prompt" and capture.layer in features.layers:
        return HiddenReadout(
            "complete", capture.layer, position=0, values=features.hidden[row, features.layers.index(capture.layer)]
        )
    of_data = isinstance(capture.positions, SpanPositions) and capture.positions.span == DATA
    if of_data and pooling == "mean" and capture.layer in features.mean_layers:
        # The mean over one row that is the mean over all tokens is the same mean.
        values = features.mean[row, features.mean_layers.index(capture.layer)][None]
        return RowsReadout("complete", capture.layer, positions=(0,), token_ids=(0,), values=values)
    raise FeatureError(f"layer {capture.layer} at {capture.positions} is not among what is kept of rows")


def _attention(capture: AttentionCapture, features: Features, row: int) -> Readout:
    if set(capture.spans) > {INSTRUCTION, DATA} or not set(capture.heads) <= set(features.heads):
        raise FeatureError(f"attention on {', '.join(capture.spans)} is not among what is kept of rows")
    at = [features.heads.index(head) for head in capture.heads]
    return AttentionReadout(
        "complete",
        capture.heads,
        positions=(0,),
        mass={INSTRUCTION: features.mass[row, at, 0], DATA: features.mass[row, at, 1]},
    )
