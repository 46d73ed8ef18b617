"""Scores of whole sets of rows: through the detectors themselves, from what is kept of the rows.

Owns turning kept features back into readouts, so that what is evaluated is the code that serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from detectors.base import CapturePlan, Detector, EngineProbe, Score
from detectors.calibration.feature_store import FeatureError
from detectors.calibration.features import Features
from detectors.calibration.metrics import Scores
from detectors.calibration.rows import Row
from detectors.combination import Combination
from detectors.probe import Probe
from detectors.text_baseline import TextBaseline
from detectors.windows import DATA, INSTRUCTION
from guard.mia.results import AttentionReadout, HiddenReadout, ProbeReadout, Readout, RowsReadout
from guard.mia.spec import AttentionCapture, FirstGenerated, HiddenCapture, SpanPositions


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
            raise FeatureError(f"the combination needs scores of {', '.join(sorted(missing))}, which are not there")
        return combined(detector, {name: others[name] for name in detector.inputs})
    if isinstance(detector, TextBaseline):
        return np.array([detector.score_text(row.text).value for row in rows], dtype=np.float64)
    return scores_of(detector, features)


def scores_of(detector: Detector, features: Features) -> Scores:
    """``[rows]``. Raises ``FeatureError`` when the detector reads what is not kept, or has no score for a row."""
    plan = detector.plan()
    pooling = detector.config.params.pooling if isinstance(detector, Probe) else "last_token"
    scores = []
    for row in range(len(features.hidden)):
        score = detector.score(readouts_of(plan, features, row, pooling))
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


def readouts_of(plan: CapturePlan, features: Features, row: int, pooling: str) -> dict[str, Readout]:
    """What an engine would have answered for one row. Raises ``FeatureError`` for what is not kept of rows."""
    hidden: dict[str, Readout] = {
        name: _hidden(capture, features, row, pooling) for name, capture in plan.hidden.items()
    }
    probes = {name: _logits(probe, features, row, pooling) for name, probe in plan.probes.items()}
    return hidden | probes | {name: _attention(capture, features, row) for name, capture in plan.attention.items()}


def _hidden(capture: HiddenCapture, features: Features, row: int, pooling: str) -> HiddenReadout | RowsReadout:
    if capture.positions == "last_prompt" and capture.layer in features.layers:
        return HiddenReadout(
            "complete", capture.layer, position=0, values=features.hidden[row, features.layers.index(capture.layer)]
        )
    of_data = isinstance(capture.positions, SpanPositions) and capture.positions.span == DATA
    if of_data and pooling == "mean" and capture.layer in features.mean_layers:
        # The mean over one row that is the mean over all tokens is the same mean.
        values = features.mean[row, features.mean_layers.index(capture.layer)][None]
        return RowsReadout("complete", capture.layer, positions=(0,), token_ids=(0,), values=values)
    if of_data:
        raise FeatureError(
            f"the {pooling} of layer {capture.layer} over the data's tokens is not among what is kept of rows: "
            f"means at layers {', '.join(map(str, features.mean_layers)) or 'none'} are"
        )
    raise FeatureError(f"layer {capture.layer} at {capture.positions} is not among what is kept of rows")


def _logits(probe: EngineProbe, features: Features, row: int, pooling: str) -> Readout:
    """What the engine would have computed: the same sum, of the state that is kept."""
    state = _hidden(HiddenCapture(layer=probe.layer, positions=probe.positions), features, row, pooling)
    assert state.values is not None
    logits = np.atleast_2d(state.values) @ probe.weight.T + probe.bias
    return ProbeReadout("complete", probe.name, positions=(0,), token_ids=(0,), logits=logits.astype(np.float32))


def _attention(capture: AttentionCapture, features: Features, row: int) -> Readout:
    if capture.weights or isinstance(capture.positions, FirstGenerated):
        what = "on each token" if capture.weights else "from generated tokens"
        raise FeatureError(
            f"attention {what} is not among what is kept of rows: its sums from the last prompt token are"
        )
    if set(capture.spans) > {INSTRUCTION, DATA} or not set(capture.heads) <= set(features.heads):
        raise FeatureError(f"attention on {', '.join(capture.spans)} is not among what is kept of rows")
    at = [features.heads.index(head) for head in capture.heads]
    return AttentionReadout(
        "complete",
        capture.heads,
        positions=(0,),
        mass={INSTRUCTION: features.mass[row, at, 0], DATA: features.mass[row, at, 1]},
    )
