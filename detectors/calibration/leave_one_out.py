"""Each set left out in turn: probe, text baseline and both together, fitted without it, measured on all of its rows.

Owns the folds. What is nearly the same as a row of the set that is left out leaves with it, wherever it was read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from detectors.calibration.baseline import baseline_scores, fit_baseline, unseen_scores
from detectors.calibration.demands import LEAST_MEASURED
from detectors.calibration.evaluation import SLICE_ROUNDS, Measured, measured
from detectors.calibration.features import Features
from detectors.calibration.fit_combination import fit_combination
from detectors.calibration.fit_probe import refit
from detectors.calibration.logistic import Linear, calibrate
from detectors.calibration.metrics import Labels, Scores
from detectors.calibration.probe_candidates import Choice, LabelledRows
from detectors.calibration.rows import Row
from detectors.calibration.scoring import combined
from detectors.combination import Combination, CombinationConfig
from detectors.linear import sigmoid
from detectors.model_config import ModelInfo

KINDS = ("probe", "text_baseline", "combination")

Index = npt.NDArray[np.int64]


def leave_one_out(
    rows: Sequence[Row],
    features: Features,
    choice: Choice | None,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Measured]]:
    """Kind of ``KINDS`` -> set -> measures.

    ``choice``: layers and tokens, which stay those of the whole calibration; everything else is fitted anew. None:
    text alone is measured.
    A set's rows of all splits count, together with held-out benign rows of the other sets, which neither saw.
    """
    labels = np.array([row.label == "attack" for row in rows], dtype=np.int64)
    found: dict[str, dict[str, Measured]] = {kind: {} for kind in KINDS}
    for source in sorted({row.source for row in rows}):
        train, validation, test = fold(rows, source)
        least = min(min(np.bincount(labels[part], minlength=2)) for part in (train, validation, test))
        if least < LEAST_MEASURED:
            say(f"without {source}: not measured, since too few rows of either label are left or are in it")
            continue
        say(f"without {source}")
        groups = [rows[i].group for i in test]
        for kind, scores in _scores(rows, features, labels, (train, validation, test), choice, seed).items():
            found[kind][source] = measured(scores, labels[test], groups, seed, SLICE_ROUNDS, "itself and held-out rows")
    return found


def fold(rows: Sequence[Row], source: str) -> tuple[Index, Index, Index]:
    """Training, validation and test rows with ``source`` left out.

    A set without attacks is measured against the held-out attacks of the others.
    """
    left = {row.group for row in rows if row.source == source}
    has_attacks = any(row.source == source and row.label == "attack" for row in rows)
    compared = "benign" if has_attacks else "attack"

    def where(split: str) -> Index:
        return np.flatnonzero([row.split == split and row.source != source and row.group not in left for row in rows])

    test = [
        row.source == source or (row.split == "held_out" and row.group not in left and row.label == compared)
        for row in rows
    ]
    return where("train"), where("validation"), np.flatnonzero(test)


def _scores(
    rows: Sequence[Row],
    features: Features,
    labels: Labels,
    parts: tuple[Index, Index, Index],
    choice: Choice | None,
    seed: int,
) -> dict[str, Scores]:
    """By kind ``[test rows]``. The combination is fitted to scores of rows that its inputs did not see."""
    train, validation, test = parts
    both = np.concatenate([train, validation])
    groups = [rows[i].group for i in both]
    texts = [row.text for row in rows]
    text = fit_baseline([texts[i] for i in train], labels[train], [texts[i] for i in validation], labels[validation])
    text_unseen = unseen_scores(text, [texts[i] for i in both], labels[both], groups, seed)
    scaling = calibrate(Linear(np.zeros(0), 0.0), text_unseen, labels[both])
    found = {"text_baseline": np.asarray(sigmoid(scaling.scores(baseline_scores(text, [texts[i] for i in test]))))}
    if choice is None:
        return found
    seen, checked = (
        LabelledRows(features.part(index), labels[index], [rows[i].group for i in index])
        for index in (train, validation)
    )
    probe = refit(seen, checked, choice, seed)
    found = {"probe": np.asarray(sigmoid(probe.logits(features.part(test)))), **found}
    unseen = {
        "probe": np.asarray(sigmoid(probe.unseen)),
        "text_baseline": np.asarray(sigmoid(scaling.scores(text_unseen))),
    }
    config = CombinationConfig(model_info=ModelInfo(name="left-out"), params=fit_combination(unseen, labels[both]))
    return found | {"combination": combined(Combination(config), found)}
