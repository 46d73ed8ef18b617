"""Logistic regression on hidden states: fitted exactly where there are more columns than rows, folded to plain weights.

Owns the fit and its cross-validation. Knows nothing about layers or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedGroupKFold  # type: ignore[import-untyped]

from detectors.calibration.metrics import Labels, Scores

Matrix = npt.NDArray[np.float64]

FOLDS = 5


@dataclass(frozen=True)
class Linear:
    """``logit = x @ weight + bias`` on raw columns: scaling is folded in."""

    weight: npt.NDArray[np.float64]
    bias: float

    def logits(self, x: Matrix) -> Scores:
        return np.asarray(x @ self.weight + self.bias)


def fit(x: Matrix, labels: Labels, regularisation: float) -> Linear:
    """Standardise, fit with an L2 penalty (``regularisation`` is scikit-learn's C), fold the scaling into the weights.

    The rows are first rotated into their own span, which has at most as many dimensions as there are rows. An L2
    penalty does not see rotations, so the result is the same, and thousands of columns cost no more than the rows do.
    """
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    left, singular, right = np.linalg.svd((x - mean) / scale, full_matrices=False)
    model = LogisticRegression(C=regularisation, class_weight="balanced", solver="newton-cholesky", max_iter=200)
    model.fit(left * singular, labels)
    weight = (model.coef_[0] @ right) / scale
    return Linear(weight, float(model.intercept_[0] - mean @ weight))


def out_of_fold_logits(x: Matrix, labels: Labels, groups: Sequence[str], regularisation: float, seed: int) -> Scores:
    """Every row's logit from a fit that saw no row of its group."""
    logits = np.zeros(len(labels))
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    for seen, unseen in folds.split(x, labels, groups):
        logits[unseen] = fit(x[seen], labels[seen], regularisation).logits(x[unseen])
    return logits


def calibrate(model: Linear, logits: Scores, labels: Labels) -> Linear:
    """Platt scaling, folded in: a slope and an offset that make sigmoid(logit) a probability at equal class sizes.

    ``logits`` are out of fold: on its own training rows a model is far too sure of itself.
    """
    platt = LogisticRegression(C=np.inf, class_weight="balanced").fit(logits[:, None], labels)
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    return Linear(model.weight * slope, model.bias * slope + offset)
