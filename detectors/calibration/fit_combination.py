"""Fits the weights of a combination: logistic regression on other detectors' scores.

The rows must be such that the detectors were not fitted to them: on their own training rows they are too sure of
themselves, and the surest would get all the weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

from detectors.calibration.metrics import Labels, Scores
from detectors.combination import Input, Params, transformed

REGULARISATION = 1.0


def fit_combination(
    scores: Mapping[str, Scores],
    labels: Labels,
    when_missing: Mapping[str, float] | None = None,
    fitted_to: Mapping[str, str] | None = None,
) -> Params:
    """scores: by detector's kind, probabilities ``[rows]``, none missing; labels ``[rows]``. ``when_missing``: as in
    ``Input``; an input that is not in it must be there. fitted_to: fingerprints of the detectors that gave the scores.
    """
    columns = np.array([[transformed(float(value), "logit") for value in values] for values in scores.values()]).T
    mean, scale = columns.mean(axis=0), columns.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    model = LogisticRegression(C=REGULARISATION, class_weight="balanced").fit((columns - mean) / scale, labels)
    weights = model.coef_[0] / scale
    missing = when_missing or {}
    return Params(
        inputs={
            kind: Input(
                weight=float(weight),
                transform="logit",
                when_missing=missing.get(kind),
                fitted_to=(fitted_to or {}).get(kind),
            )
            for kind, weight in zip(scores, weights, strict=True)
        },
        bias=float(model.intercept_[0] - weights @ mean),
    )
