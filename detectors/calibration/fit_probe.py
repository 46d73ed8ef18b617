"""Chooses the probe's layers and regularisation, fits it on training rows and calibrates it.

The choice is made on validation rows, not by cross-validation among training rows: attacks come in few families, folds
of the same families prefer late single layers that then do worse on families never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.metrics import brier_score_loss, roc_auc_score  # type: ignore[import-untyped]

from detectors.calibration.features import Features
from detectors.calibration.logistic import Linear, Matrix, calibrate, fit, out_of_fold_logits
from detectors.calibration.metrics import Labels, Scores
from detectors.probe import sigmoid

REGULARISATIONS = (1e-3, 1e-2, 1e-1)
MOST_LAYERS = 6


@dataclass(frozen=True)
class TrainingRows:
    features: Features
    labels: Labels
    groups: Sequence[str]


@dataclass(frozen=True)
class Candidate:
    layers: tuple[int, ...]
    regularisation: float
    auroc: float

    def __str__(self) -> str:
        return f"{list(self.layers)} with C={self.regularisation:g}: {self.auroc:.3f}"


@dataclass(frozen=True)
class FittedProbe:
    layers: tuple[int, ...]
    linear: Linear
    choices: dict[str, str]

    def logits(self, features: Features) -> Scores:
        return self.linear.logits(columns(features, self.layers))


def fit_probe(train: TrainingRows, validation: Features, labels: Labels, seed: int) -> FittedProbe:
    """The candidate with the best AUROC on validation rows; of equals the one that reads fewer layers."""
    tried = [
        _try(train, validation, labels, layers, regularisation)
        for layers in candidates(train.features.layers)
        for regularisation in REGULARISATIONS
    ]
    best = max(tried, key=lambda c: c.auroc)
    best_single = max((c for c in tried if len(c.layers) == 1), key=lambda c: c.auroc)
    x = columns(train.features, best.layers)
    unseen = out_of_fold_logits(x, train.labels, train.groups, best.regularisation, seed)
    linear = calibrate(fit(x, train.labels, best.regularisation), unseen, train.labels)
    probabilities = sigmoid(linear.logits(columns(validation, best.layers)))
    return FittedProbe(
        best.layers,
        linear,
        {
            "layers and regularisation": f"AUROC on validation rows: {best}; best single layer: {best_single}",
            "calibration": "Platt scaling on out-of-fold logits of training rows, equal class sizes; "
            f"Brier score on validation rows {brier_score_loss(labels, probabilities):.3f}",
        },
    )


def candidates(layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Every single layer, then sets of 2 to 6 evenly spaced ones that end with the last."""
    spaced = [
        tuple(dict.fromkeys(layers[round(len(layers) * i / count) - 1] for i in range(1, count + 1)))
        for count in range(2, min(MOST_LAYERS, len(layers)) + 1)
    ]
    return [*((layer,) for layer in layers), *dict.fromkeys(spaced)]


def columns(features: Features, layers: Sequence[int]) -> Matrix:
    """``[rows, layers x hidden_size]`` float64, in the order of ``layers``."""
    chosen = features.hidden[:, [features.layers.index(layer) for layer in layers]]
    return chosen.reshape(len(chosen), -1).astype(np.float64)


def _try(
    train: TrainingRows, validation: Features, labels: Labels, layers: tuple[int, ...], regularisation: float
) -> Candidate:
    model = fit(columns(train.features, layers), train.labels, regularisation)
    return Candidate(layers, regularisation, float(roc_auc_score(labels, model.logits(columns(validation, layers)))))
