"""Fits a probe that reads long data window by window, beside the rows of every calibration, and sets its thresholds.

A row's score is the highest of its whole prompt's and its windows', as it is served. Windows of benign documents are
benign rows; of attacked documents none is fitted to, since hardly any of their windows has the attack. Scaling and
thresholds come from scores out of fold: each is by a fit that saw nothing of the row's group or of the document's
package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from detectors.calibration.logistic import Linear, Matrix, calibrate, fit, out_of_fold_logits
from detectors.calibration.metrics import (
    BUDGETS,
    Labels,
    Scores,
    Tried,
    balanced_threshold,
    rows_needed,
    threshold_for_fpr,
)
from detectors.calibration.window_rows import WindowRows

LEAST_DOCUMENTS = rows_needed(BUDGETS["fpr_5pct"])
"""Different long documents, below which no threshold is set: of fewer nothing shows that the laxest budget is kept."""


@dataclass(frozen=True)
class Served:
    """Rows as they are served. whole: ``[rows, columns]``; of_windows: ``[windows, columns]``, in the order of
    ``windows``."""

    whole: Matrix
    of_windows: Matrix
    windows: WindowRows

    def highest(self, whole: Scores, of_windows: Scores) -> Scores:
        """``[rows]``, of the scores of either."""
        return self.windows.highest(np.arange(len(whole)), whole, of_windows)

    def scores(self, linear: Linear) -> Scores:
        """``[rows]``, logits."""
        return self.highest(linear.logits(self.whole), linear.logits(self.of_windows))

    def each_windows(self, names: Sequence[str]) -> list[str]:
        """Of every window the name of the row that it is from."""
        found = [""] * len(self.of_windows)
        for row, at in self.windows.of.items():
            for window in at:
                found[window] = names[row]
        return found


@dataclass(frozen=True)
class FittedWindows:
    """Logits out of fold. of_rows: ``[rows]``; of_documents: ``[documents]``, as served."""

    linear: Linear
    of_rows: Scores
    of_documents: Scores


def fit_windows(
    x: Matrix,
    labels: Labels,
    groups: Sequence[str],
    documents: Served,
    packages: Sequence[str],
    regularisation: float,
    seed: int,
) -> FittedWindows:
    """x, labels, groups: of rows, read whole. documents, packages: benign ones, read whole and in windows."""
    count, whole = len(x), len(documents.whole)
    every = np.concatenate([x, documents.whole, documents.of_windows])
    of_all = np.concatenate([labels, np.zeros(len(every) - count, np.int64)])
    together = [*groups, *packages, *documents.each_windows(packages)]
    found = out_of_fold_logits(every, of_all, together, regularisation, seed)
    of_rows = found[:count]
    scaled = calibrate(fit(every, of_all, regularisation), of_rows, labels)
    of_documents = documents.highest(found[count : count + whole], found[count + whole :])
    return FittedWindows(scaled.linear, scaled.scores(of_rows), scaled.scores(of_documents))


def served_thresholds(rows: Tried, documents: Tried) -> dict[str, float]:
    """Values that keep each budget among the benign rows, and among the documents, alone: the higher of the two. Names
    whose budget all of them together do not support are left out. ``documents`` are benign, each scored as served."""
    benign, groups = rows.of(0)
    of_documents, document_groups = documents.of(0)
    different = _different(benign, groups) + _different(of_documents, document_groups)
    values = {
        name: max(threshold_for_fpr(benign, budget, groups), threshold_for_fpr(of_documents, budget, document_groups))
        for name, budget in BUDGETS.items()
        if different >= rows_needed(budget)
    }
    highest = max(benign.max(), of_documents.max())
    # Scores of our kinds end at 1: where too many have that, nothing lies above them.
    values = {name: value for name, value in values.items() if not value > 1.0 >= highest}
    values["balanced"] = balanced_threshold(
        np.concatenate([rows.scores, documents.scores]), np.concatenate([rows.labels, documents.labels])
    )
    return values


def _different(scores: Scores, groups: Sequence[str] | None) -> int:
    return len(scores) if groups is None else len(set(groups))
