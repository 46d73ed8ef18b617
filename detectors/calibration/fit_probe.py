"""Chooses the probe's layers, tokens and regularisation, fits it on training rows and calibrates it.

The choice is made on validation rows, not by cross-validation among training rows: attacks come in few families, folds
of the same families prefer late single layers that then do worse on families never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from sklearn.metrics import brier_score_loss  # type: ignore[import-untyped]

from detectors.calibration.features import Features
from detectors.calibration.logistic import Linear, Matrix, Rotated, calibrate, out_of_fold_logits
from detectors.calibration.metrics import Labels, Scores, auroc, tpr_at_fpr
from detectors.probe import sigmoid

Pooling = Literal["last_token", "mean"]

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1)
MOST_LAYERS = 6


@dataclass(frozen=True)
class TrainingRows:
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
    """Of attacks on validation rows, at 1 % false positives."""

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
    choice: Choice
    linear: Linear
    choices: dict[str, str]

    @property
    def layers(self) -> tuple[int, ...]:
        return self.choice.layers

    def logits(self, features: Features) -> Scores:
        return self.linear.logits(self.choice.columns(features))


def fit_probe(
    train: TrainingRows,
    validation: Features,
    labels: Labels,
    seed: int,
    choices: Sequence[Choice] | None = None,
) -> FittedProbe:
    """The best candidate on validation rows; of equals the one that reads fewer layers. ``choices``: these alone."""
    tried = [
        candidate
        for choice in choices or tuple(candidates(train.features))
        for candidate in _tried(train, validation, labels, choice)
    ]
    best = max(tried, key=lambda c: c.merit)
    by_kind = {
        "best single layer": [c for c in tried if len(c.choice.layers) == 1],
        "best of the other tokens": [c for c in tried if c.choice.pooling != best.choice.pooling],
    }
    others = "; ".join(f"{name}: {max(some, key=lambda c: c.merit)}" for name, some in by_kind.items() if some)
    x = best.choice.columns(train.features)
    unseen = out_of_fold_logits(x, train.labels, train.groups, best.regularisation, seed)
    linear = calibrate(Rotated(x).fit(train.labels, best.regularisation), unseen, train.labels)
    probabilities = sigmoid(linear.logits(best.choice.columns(validation)))
    return FittedProbe(
        best.choice,
        linear,
        {
            "layers, tokens and regularisation": f"on validation rows: {best}" + (f"; {others}" if others else ""),
            "calibration": "Platt scaling on out-of-fold logits of training rows, equal class sizes; "
            f"Brier score on validation rows {brier_score_loss(labels, probabilities):.3f}",
        },
    )


def candidates(features: Features) -> Iterator[Choice]:
    """Of each kind of tokens every single layer, then sets of 2 to 6 evenly spaced ones that end with the last."""
    kinds: tuple[tuple[Pooling, tuple[int, ...]], ...] = (
        ("last_token", features.layers),
        ("mean", features.mean_layers),
    )
    for pooling, layers in kinds:
        spaced = [
            tuple(dict.fromkeys(layers[round(len(layers) * i / count) - 1] for i in range(1, count + 1)))
            for count in range(2, min(MOST_LAYERS, len(layers)) + 1)
        ]
        for chosen in dict.fromkeys([*((layer,) for layer in layers), *spaced]):
            yield Choice(pooling, chosen)


def _tried(train: TrainingRows, validation: Features, labels: Labels, choice: Choice) -> Iterator[Candidate]:
    rotated, x = Rotated(choice.columns(train.features)), choice.columns(validation)
    for regularisation in REGULARISATIONS:
        logits = rotated.fit(train.labels, regularisation).logits(x)
        yield Candidate(choice, regularisation, auroc(logits, labels), tpr_at_fpr(logits, labels, 0.01))
