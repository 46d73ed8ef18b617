"""What a probe may read and how it may be fitted, and how good each of these is: what the choice is among.

Owns a candidate's measure. Fits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from detectors.calibration.features import Features
from detectors.calibration.fitted import Pooling
from detectors.calibration.logistic import Linear, Matrix
from detectors.calibration.metrics import Labels, Scores, auroc, tpr_at_fpr


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
        """``[rows, layers x hidden_size]`` float64, in the order of ``layers``; not for ``max``, which reads tokens."""
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
    rounds: int | None = None
    """Of ``max``: how often the highest tokens were looked for."""

    @property
    def merit(self) -> float:
        """Both measures count: AUROC alone does not see the few benign rows with high scores."""
        return self.auroc + 0.1 * self.caught

    def __str__(self) -> str:
        rounds = "" if self.rounds is None else f" after {self.rounds} rounds"
        return (
            f"{self.choice.pooling} of layers {list(self.choice.layers)} with C={self.regularisation:g}{rounds}: "
            f"AUROC {self.auroc:.3f}, {self.caught:.0%} at 1 %"
        )


def candidate(
    choice: Choice, regularisation: float, scores: Scores, labels: Labels, rounds: int | None = None
) -> Candidate:
    """Measured by these scores."""
    found = auroc(scores, labels), tpr_at_fpr(scores, labels, 0.01)
    return Candidate(choice, regularisation, *found, rounds)


@dataclass(frozen=True)
class Shortlisted:
    """``measured`` out of fold on training and validation rows; ``unseen``: these scores, a logit of each training
    row, then of each validation row; ``fit``: its fit to all of them, before scaling."""

    measured: Candidate
    unseen: Scores
    fit: Callable[[], Linear]
