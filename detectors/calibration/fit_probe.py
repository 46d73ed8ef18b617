"""Chooses the probe's layers, tokens and regularisation, fits it and calibrates it.

Validation rows make a shortlist of what was fitted to training rows; out-of-fold scores of both together decide among
it, since validation rows alone are few enough for luck to decide. What was chosen is then fitted to both. Probabilities
and thresholds come from the same out-of-fold scores: each row's is by a fit that saw nothing of its group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from safetensors.numpy import save
from sklearn.metrics import brier_score_loss  # type: ignore[import-untyped]

from detectors.calibration.feature_store import FeatureError
from detectors.calibration.features import Features
from detectors.calibration.fit_max import max_logits, max_shortlist
from detectors.calibration.fitted import ONE_POOLING, Pooling, PoolingChoice
from detectors.calibration.logistic import Linear, Rotated, calibrate, out_of_fold_logits
from detectors.calibration.logistic import fit as fit_logistic
from detectors.calibration.metrics import Labels, Scores
from detectors.calibration.probe_candidates import Candidate, Choice, LabelledRows, Shortlisted, candidate
from detectors.linear import sigmoid
from detectors.probe import BIAS, WEIGHT, Params

REGULARISATIONS = (1e-4, 1e-3, 1e-2, 1e-1)
SET_SIZES = (2, 3, 4, 5, 6, 8, 10, 15)
SHORTLIST = 6


@dataclass(frozen=True)
class FittedProbe:
    """``unseen``: a logit of each training row, then of each validation row, by a fit that saw nothing of its group."""

    choice: Choice
    linear: Linear
    unseen: Scores
    choices: dict[str, str]
    regularisation: float

    @property
    def layers(self) -> tuple[int, ...]:
        return self.choice.layers

    def logits(self, features: Features) -> Scores:
        if self.choice.pooling == "max":
            return max_logits(features, self.choice.layers[0], self.linear)
        return self.linear.logits(self.choice.columns(features))


def fit_probe(
    train: LabelledRows,
    validation: LabelledRows,
    seed: int,
    pooling: PoolingChoice = "last_token",
) -> FittedProbe:
    """The best candidate; of equals the one that reads fewer layers. ``best``: of all three ways to pool. Raises
    ``FeatureError`` where nothing was read that it could choose from."""
    tried, shortlist = 0, list[Shortlisted]()
    for one in ONE_POOLING if pooling == "best" else (pooling,):
        count, some = (
            max_shortlist(train, validation, REGULARISATIONS, seed)
            if one == "max"
            else _shortlist(train, validation, one, seed)
        )
        tried, shortlist = tried + count, shortlist + some
    if not shortlist:
        raise FeatureError(
            f"no {pooling} of states was read: the engine's max_hidden_rows_per_step is too small for the states of "
            "every token"
        )
    best = max(shortlist, key=lambda one: one.measured.merit)
    others = "; ".join(str(one.measured) for one in shortlist if one is not best)
    labels = np.concatenate([train.labels, validation.labels])
    choice, linear, unseen = _scaled(best, labels)
    brier = brier_score_loss(labels, sigmoid(unseen))
    return FittedProbe(
        choice,
        linear,
        unseen,
        {
            "layers and regularisation": f"{tried} tried on validation rows; of the best, out of fold on training "
            f"and validation rows: {best.measured}" + (f"; others: {others}" if others else ""),
            "weights": "training and validation rows together",
            "calibration": "Platt scaling on out-of-fold logits of these rows, equal class sizes; Brier score of them "
            f"{brier:.3f}",
            "thresholds": "on out-of-fold scores of the benign ones among these rows",
        },
        best.measured.regularisation,
    )


def refit(train: LabelledRows, validation: LabelledRows, choice: Choice, seed: int) -> FittedProbe:
    """For given layers and tokens, not the highest: the best penalty on validation rows, fitted to both."""
    best = max(_tried(train, validation, choice), key=lambda c: c.merit)
    labels = np.concatenate([train.labels, validation.labels])
    scaled = _scaled(_out_of_fold(train, validation, best, labels, seed), labels)
    return FittedProbe(*scaled, {}, best.regularisation)


def probe_files(choice: Choice, linear: Linear, config_key: str, hidden_size: int) -> tuple[Params, bytes]:
    """What is written: the file's ``params``, and its weights."""
    weights = save(
        {WEIGHT: linear.weight.astype(np.float32), BIAS: np.array([linear.bias], dtype=np.float32)},
        metadata={"model": config_key},  # one entry: the format keeps several in no fixed order
    )
    given = {
        "layers": choice.layers,
        "hidden_size": hidden_size,
        "weights": f"{config_key}.safetensors",
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        **({"pooling": choice.pooling} if choice.pooling != "last_token" else {}),
    }
    return Params.model_validate(given), weights


def _scaled(one: Shortlisted, labels: Labels) -> tuple[Choice, Linear, Scores]:
    """Fitted to all rows, and scaled by its logits out of fold."""
    scaled = calibrate(one.fit(), one.unseen, labels)
    return one.measured.choice, scaled.linear, scaled.scores(one.unseen)


def _shortlist(
    train: LabelledRows, validation: LabelledRows, pooling: Pooling, seed: int
) -> tuple[int, list[Shortlisted]]:
    """How many were tried, and the best of them."""
    tried = [one for choice in candidates(train.features, pooling) for one in _tried(train, validation, choice)]
    labels = np.concatenate([train.labels, validation.labels])
    best = sorted(tried, key=lambda c: -c.merit)[:SHORTLIST]
    return len(tried), [_out_of_fold(train, validation, one, labels, seed) for one in best]


def _out_of_fold(
    train: LabelledRows, validation: LabelledRows, one: Candidate, labels: Labels, seed: int
) -> Shortlisted:
    x = np.concatenate([one.choice.columns(part.features) for part in (train, validation)])
    unseen = out_of_fold_logits(x, labels, [*train.groups, *validation.groups], one.regularisation, seed)
    measured = candidate(one.choice, one.regularisation, unseen, labels)
    return Shortlisted(measured, unseen, partial(fit_logistic, x, labels, one.regularisation))


def candidates(features: Features, pooling: Pooling) -> Iterator[Choice]:
    """Every single layer, then evenly spaced sets that end with the last."""
    layers: Sequence[int] = features.mean_layers if pooling == "mean" else features.layers
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
        yield candidate(choice, regularisation, logits, validation.labels)
