"""Logistic regression on hidden states: fitted exactly where there are more columns than rows, folded to plain weights.

Owns the fit and its cross-validation. Knows nothing about layers or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.model_selection import StratifiedGroupKFold  # type: ignore[import-untyped]

from detectors.calibration.metrics import Labels, Scores

Matrix = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

FOLDS = 5


@dataclass(frozen=True)
class Linear:
    """``logit = x @ weight + bias`` on raw columns: scaling is folded in."""

    weight: npt.NDArray[np.float64]
    bias: float

    def logits(self, x: Matrix) -> Scores:
        return np.asarray(x @ self.weight + self.bias)


class Rotated:
    """Rows, standardised and rotated into their own span once, to be fitted with several penalties.

    The span has at most as many dimensions as there are rows. An L2 penalty does not see rotations, so the result is
    the same, and thousands of columns cost no more than the rows do.
    """

    def __init__(self, x: Matrix) -> None:
        self.mean, scale = x.mean(axis=0), x.std(axis=0)
        self.scale = np.where(scale > 0, scale, 1.0)
        standard = (x - self.mean) / self.scale
        # Of the smaller Gram matrix, which is much quicker than the singular values of a wide matrix.
        if standard.shape[0] <= standard.shape[1]:
            values, left = np.linalg.eigh(standard @ standard.T)
            kept = values > values[-1] * 1e-10
            singular = np.sqrt(values[kept])
            self.rows = left[:, kept] * singular
            self.right = (left[:, kept] / singular).T @ standard
        else:
            values, right = np.linalg.eigh(standard.T @ standard)
            kept = values > values[-1] * 1e-10
            self.right = right[:, kept].T
            self.rows = standard @ right[:, kept]

    def fit(self, labels: Labels, regularisation: float, weights: npt.NDArray[np.float64] | None = None) -> Linear:
        """Logistic regression with an L2 penalty (``regularisation`` is scikit-learn's C), the scaling folded in.

        weights: what each row counts; None for as much as makes both labels count the same.
        """
        balanced = "balanced" if weights is None else None
        model = LogisticRegression(C=regularisation, class_weight=balanced, solver="newton-cholesky", max_iter=200)
        model.fit(self.rows, labels, sample_weight=weights)
        weight = (model.coef_[0] @ self.right) / self.scale
        return Linear(weight, float(model.intercept_[0] - self.mean @ weight))


def fit(x: Matrix, labels: Labels, regularisation: float) -> Linear:
    return Rotated(x).fit(labels, regularisation)


def out_of_fold_logits(x: Matrix, labels: Labels, groups: Sequence[str], regularisation: float, seed: int) -> Scores:
    """Every row's logit from a fit that saw no row of its group."""
    logits = np.zeros(len(labels))
    for seen, unseen in folds(labels, groups, seed):
        logits[unseen] = fit(x[seen], labels[seen], regularisation).logits(x[unseen])
    return logits


def folds(labels: Labels, groups: Sequence[str], seed: int) -> Iterator[tuple[Index, Index]]:
    """Indices of rows to fit to and of the others; every row is one of the others once, and no group is in both."""
    split = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    yield from split.split(np.zeros((len(labels), 1)), labels, groups)


@dataclass(frozen=True)
class Scaled:
    """``linear`` has slope and offset folded in; ``scores`` puts other logits of the model before scaling onto it."""

    linear: Linear
    slope: float
    offset: float

    def scores(self, logits: Scores) -> Scores:
        return np.asarray(logits * self.slope + self.offset)


def calibrate(model: Linear, logits: Scores, labels: Labels) -> Scaled:
    """Platt scaling: a slope and an offset that make sigmoid(logit) a probability at equal class sizes.

    ``logits`` are out of fold: on its own training rows a model is far too sure of itself.
    """
    platt = LogisticRegression(C=np.inf, class_weight="balanced").fit(logits[:, None], labels)
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    return Scaled(Linear(model.weight * slope, model.bias * slope + offset), slope, offset)
