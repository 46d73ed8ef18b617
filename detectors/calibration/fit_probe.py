"""Chooses the probe's layers and regularisation, fits it and calibrates it.

Validation rows make a shortlist of what was fitted to training rows; out-of-fold scores of both together decide among
it, since validation rows alone are few enough for luck to decide. What was chosen is then fitted to both. Probabilities
and thresholds come from the same out-of-fold scores: each row's is by a fit that saw nothing of its group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from sklearn.metrics import brier_score_loss  # type: ignore[import-untyped]

from detectors.calibration.features import Features
from detectors.calibration.fitted import Pooling
from detectors.calibration.logistic import Linear, Matrix, Rotated, calibrate, out_of_fold_logits
from detectors.calibration.metrics import Labels, Scores, auroc, tpr_at_fpr
from detectors.probe import sigmoid

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1)
SET_SIZES = (2, 3, 4, 5, 6, 8, 10, 15)
SHORTLIST = 6


@dataclass(frozen=True)
class LabelledRows:
    features: Features
    labels: Labels
    groups: Sequence[str]


@dataclass(frozen=True)
class Choice:
    """What is read: which layers, and at which tokens of the prompt."""

    pooling: Pooling
    layers: tuple[int, ...]

    def columns(self, features: Features) -> Matrix:
        """``[rows, layers x hidden_size]`` float64, in the order of ``layers``."""
        if self.pooling == "mean":
            chosen = features.mean[:, [features.mean_layers.index(layer) for layer in self.layers]]
        else:
            chosen = features.hidden[:, [features.layers.index(layer) for layer in self.layers]]
        return chosen.reshape(len(chosen), -1).astype(np.float64)


@dataclass(frozen=True)
class Candidate:
    choice: Choice
    regularisation: float
    auroc: float
    caught: float
    """Of the attacks, at 1 % false positives."""

    @property
    def merit(self) -> float:
        """Both measures count: AUROC alone does not see the few benign rows with high scores."""
        return self.auroc + 0.1 * self.caught

    def __str__(self) -> str:
        return (
            f"{self.choice.pooling} of layers {list(self.choice.layers)} with C={self.regularisation:g}: "
            f"AUROC {self.auroc:.3f}, {self.caught:.0%} at 1 %"
        )


@dataclass(frozen=True)
class FittedProbe:
    """``unseen``: a logit of each training row, then of each validation row, by a fit that saw nothing of its group."""

    choice: Choice
    linear: Linear
    unseen: Scores
    choices: dict[str, str]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.choice.layers

    def logits(self, features: Features) -> Scores:
        return self.linear.logits(self.choice.columns(features))


def fit_probe(
    train: LabelledRows,
    validation: LabelledRows,
    seed: int,
    pooling: Pooling = "last_token",
) -> FittedProbe:
    """The best candidate; of equals the one that reads fewer layers."""
    tried = [
        candidate for choice in candidates(train.features, pooling) for candidate in _tried(train, validation, choice)
    ]
    labels = np.concatenate([train.labels, validation.labels])
    groups = [*train.groups, *validation.groups]
    shortlist = []
    for one in sorted(tried, key=lambda c: -c.merit)[:SHORTLIST]:
        x = np.concatenate([one.choice.columns(part.features) for part in (train, validation)])
        unseen = out_of_fold_logits(x, labels, groups, one.regularisation, seed)
        found = auroc(unseen, labels), tpr_at_fpr(unseen, labels, 0.01)
        shortlist.append((Candidate(one.choice, one.regularisation, *found), x, unseen))
    best, x, unseen = max(shortlist, key=lambda one: one[0].merit)
    others = "; ".join(str(one) for one, _, _ in shortlist if one is not best)
    fitted = _fitted(best, x, labels, unseen)
    brier = brier_score_loss(labels, sigmoid(fitted.unseen))
    return replace(
        fitted,
        choices={
            "layers and regularisation": f"{len(tried)} tried on validation rows; of the best, out of fold on training "
            f"and validation rows: {best}" + (f"; others: {others}" if others else ""),
            "weights": "training and validation rows together",
            "calibration": "Platt scaling on out-of-fold logits of these rows, equal class sizes; Brier score of them "
            f"{brier:.3f}",
            "thresholds": "on out-of-fold scores of the benign ones among these rows",
        },
    )


def refit(train: LabelledRows, validation: LabelledRows, choice: Choice, seed: int) -> FittedProbe:
    """For given layers and tokens: the best penalty on validation rows, fitted to both."""
    best = max(_tried(train, validation, choice), key=lambda c: c.merit)
    x = np.concatenate([choice.columns(part.features) for part in (train, validation)])
    labels = np.concatenate([train.labels, validation.labels])
    unseen = out_of_fold_logits(x, labels, [*train.groups, *validation.groups], best.regularisation, seed)
    return _fitted(best, x, labels, unseen)


def _fitted(best: Candidate, x: Matrix, labels: Labels, unseen: Scores) -> FittedProbe:
    """Fitted to all rows, and scaled by ``unseen``, their logits out of fold."""
    scaled = calibrate(Rotated(x).fit(labels, best.regularisation), unseen, labels)
    return FittedProbe(best.choice, scaled.linear, scaled.scores(unseen), {})


def candidates(features: Features, pooling: Pooling) -> Iterator[Choice]:
    """Every single layer, then evenly spaced sets that end with the last."""
    layers = features.mean_layers if pooling == "mean" else features.layers
    spaced = [
        tuple(dict.fromkeys(layers[round(len(layers) * i / count) - 1] for i in range(1, count + 1)))
        for count in SET_SIZES
        if count <= len(layers)
    ]
    for chosen in dict.fromkeys([*((layer,) for layer in layers), *spaced]):
        yield Choice(pooling, chosen)


def _tried(train: LabelledRows, validation: LabelledRows, choice: Choice) -> Iterator[Candidate]:
    rotated, x = Rotated(choice.columns(train.features)), choice.columns(validation.features)
    for regularisation in REGULARISATIONS:
        logits = rotated.fit(train.labels, regularisation).logits(x)
        found = auroc(logits, validation.labels), tpr_at_fpr(logits, validation.labels, 0.01)
        yield Candidate(choice, regularisation, *found)
