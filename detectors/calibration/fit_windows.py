"""Fits a probe that reads long data window by window, beside the rows of every calibration.

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
from detectors.calibration.metrics import BUDGETS, Labels, Scores, rows_needed
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
