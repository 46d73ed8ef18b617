"""Each set left out in turn: a probe, and the text baseline, fitted without it and measured on all of its rows.

Owns the folds. What is nearly the same as a row of the set that is left out leaves with it, wherever it was read from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.evaluation import LEAST_ROWS, SLICE_ROUNDS, Measured, measured
from detectors.calibration.features import Features
from detectors.calibration.fit_probe import Choice, LabelledRows, refit
from detectors.calibration.metrics import Labels, Scores
from detectors.calibration.rows import Row

BASELINE = "text baseline"

Index = npt.NDArray[np.int64]


def leave_one_out(
    rows: Sequence[Row],
    features: Features,
    choice: Choice,
    seed: int,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, Measured]]:
    """Detector (``probe``, ``text baseline``) -> set -> measures.

    ``choice``: layers and tokens, which stay those of the whole calibration; weights and penalty are fitted anew.
    A set's rows of all splits count, together with held-out benign rows of the other sets, which neither saw.
    """
    labels = np.array([row.label == "attack" for row in rows], dtype=np.int64)
    found: dict[str, dict[str, Measured]] = {"probe": {}, BASELINE: {}}
    for source in sorted({row.source for row in rows}):
        train, validation, test = fold(rows, source)
        if len(test) == 0 or min(np.bincount(labels[test], minlength=2)) < LEAST_ROWS:
            continue
        say(f"without {source}")
        groups = [rows[i].group for i in test]
        for name, scores in (
            ("probe", _probe(features, labels, rows, train, validation, test, choice)),
            (BASELINE, _baseline(labels, rows, train, validation, test)),
        ):
            found[name][source] = measured(scores, labels[test], groups, seed, SLICE_ROUNDS, "itself and held-out rows")
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


def _probe(
    features: Features,
    labels: Labels,
    rows: Sequence[Row],
    train: Index,
    validation: Index,
    test: Index,
    choice: Choice,
) -> Scores:
    seen, checked = (
        LabelledRows(features.part(index), labels[index], [rows[i].group for i in index])
        for index in (train, validation)
    )
    return refit(seen, checked, choice).logits(choice.columns(features.part(test)))


def _baseline(labels: Labels, rows: Sequence[Row], train: Index, validation: Index, test: Index) -> Scores:
    texts = [row.text for row in rows]
    model = fit_baseline([texts[i] for i in train], labels[train], [texts[i] for i in validation], labels[validation])
    return baseline_scores(model, [texts[i] for i in test])
